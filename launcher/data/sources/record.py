"""What every source gives: records, each an image that is not read yet and the captions that belong to it."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launcher.data.decode import BadImage

_HASHED_BYTES = 64 << 20
"""Larger listing files are told apart by size and time of change, not by content."""


@dataclass(frozen=True, slots=True)
class Member:
    """An image inside an uncompressed tar: read by offset, so that workers need no tar reader."""

    tar: Path
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Record:
    """One image with its captions, or a row that could not be read (then ``problem`` is set).

    ``captions`` are (row, value) pairs; the value is whatever stood there: text, None, NaN, bytes.
    ``row`` counts from 1 as editors do for text files, and from 0 within a Parquet or tar file.
    """

    source: str
    row: int
    image: bytes | Path | Member | None = None
    captions: tuple[tuple[int, object], ...] = ()
    problem: tuple[str, str] | None = None
    """Reason (a fixed text) and detail."""
    lost: int = 1
    """Samples that a problem takes with it, as far as that is known."""


@dataclass(frozen=True)
class Source:
    """A readable source; ``read(False)`` leaves images out where that saves reading them.

    Records come in the same order at every reading: a resumed pack skips those that it has.
    """

    kind: str
    files: tuple[Path, ...]
    """The files that list the records; they tell whether the source changed."""
    read: Callable[[bool], Iterator[Record]]
    settings: tuple[str, ...] = ()
    rows: int | None = field(default=None, compare=False)
    """Number of records where it is known without reading them."""

    def fingerprint(self) -> str:
        """Give a hash that changes when the listing files or the way of reading them do."""
        hasher = hashlib.sha256(repr((self.kind, self.settings)).encode())
        for file in self.files:
            state = file.stat()
            if file.is_file() and state.st_size <= _HASHED_BYTES:
                # Without the time of change: a copy of a source, such as a new installation, is the same.
                hasher.update(hashlib.sha256(file.read_bytes()).digest())
            else:
                hasher.update(repr((file.name, state.st_size, state.st_mtime_ns)).encode())
        return hasher.hexdigest()


def read_image(image: bytes | Path | Member | None) -> bytes:
    """Fetch the encoded bytes of an image; raises BadImage."""
    if isinstance(image, bytes):
        return image
    if image is None:
        raise BadImage("image: none given")
    try:
        if isinstance(image, Path):
            return image.read_bytes()
        with image.tar.open("rb") as tar:
            tar.seek(image.offset)
            data = tar.read(image.size)
    except FileNotFoundError:
        raise BadImage("image: file missing", str(image)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadImage("image: file unreadable", str(error)) from None
    if len(data) < image.size:
        raise BadImage("image: damaged", f"{image.tar} ends before the image does")
    return data
