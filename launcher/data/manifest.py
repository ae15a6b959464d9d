"""The manifest of a store: schema, counts, sizes, checksums, tokenizer, mean and deviation."""

import hashlib
import json
import os
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from models.errors import DataError

MANIFEST = "manifest.json"
SCHEMA = 1


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Closed):
    """One file of the store. For an array, ``sha256`` is of its data in C order, without the NPY header."""

    bytes: int
    sha256: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


class Counts(_Closed):
    """What was packed and what was not, in samples (image-caption pairs) unless it says otherwise."""

    samples: int
    images: int
    """Different pictures."""
    captions: int
    """Different texts."""
    tokens: int
    """Of all different texts, [CLS] and [SEP] included."""
    records: int
    """Rows or groups of rows read from the source."""
    truncated: int
    """Samples whose caption was cut to ``max_length``."""
    skipped: int
    skipped_by_reason: dict[str, int]


class Manifest(_Closed):
    """All that a reader needs besides the arrays."""

    schema_version: int
    keep: Literal["decoded", "encoded"]
    image_size: int
    max_length: int
    tokenizer: str
    """File of the tokenizer in the store."""
    vocab_size: int
    cls_id: int
    sep_id: int
    pad_id: int
    mask_id: int
    unk_id: int
    mean: tuple[float, float, float]
    """Per channel over all different pictures, of pixels in [0, 1]."""
    std: tuple[float, float, float]
    shard_rows: int
    """Images in every shard but the last."""
    counts: Counts
    files: dict[str, FileEntry]
    checksum: str
    """SHA-256 over names and checksums of all files: equal for equal content."""
    fingerprint: str
    """Of the source and the settings of the pack."""

    @property
    def image_shards(self) -> list[str]:
        """Names of the image shards, in order."""
        return sorted(name for name in self.files if name.startswith("images-"))

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, the manifest left out."""
        return sum(entry.bytes for entry in self.files.values())

    def write(self, folder: Path) -> None:
        """Put the manifest in place at once: from here on the folder is a store."""
        write_atomically(folder / MANIFEST, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a store. Raises DataError, naming what is wrong with the folder."""
        path = folder / MANIFEST
        if not path.is_file():
            if (folder / JOURNAL).is_file():
                raise DataError(f"{folder}: the pack was not finished; run the same vlfit data pack again")
            raise DataError(f"{folder}: no {MANIFEST}, so not a data store; make one with vlfit data pack")
        try:
            content = json.loads(path.read_text())
            version = content.get("schema_version")
            if version != SCHEMA:
                raise DataError(
                    f"{path}: schema version {version}, but this vlfit reads {SCHEMA}; pack again"
                )
            return cls.model_validate(content)
        except (ValidationError, ValueError, AttributeError, OSError) as error:
            reason = str(error).splitlines()
            raise DataError(f"{path}: damaged ({' '.join(reason[:2])[:200]}); pack again") from None


JOURNAL = "packing.json"
"""State of an unfinished pack; gone from a finished store."""


def content_checksum(files: dict[str, FileEntry]) -> str:
    """Hash the checksums of all files in the order of their names."""
    lines = "".join(f"{entry.sha256}  {name}\n" for name, entry in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a file so that a reader, or a kill, meets the old content or the new, never a part.

    ``durable`` waits for the disk, so that this also holds for a loss of power.
    """
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    partial.replace(path)
