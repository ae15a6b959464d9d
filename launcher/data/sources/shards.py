"""WebDataset tar shards, as img2dataset and others write them; also plain folders of the same form.

Files that share a name up to the first dot are one sample: an image, and a caption in ``.txt`` or
``.json``. Only headers are read here; workers fetch the images by their offset.
"""

import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from launcher.data.sources.columns import CAPTION_COLUMNS, captions_of
from launcher.data.sources.record import Member, Record, Source

IMAGE_ENDINGS = frozenset(
    ["jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "jp2", "avif", "ico", "tga"]
)
_TEXT_ENDINGS = ("txt", "caption", "text")

_File = tuple[str, str, bytes | Path | Member]
"""Key, ending, and where the content is (text is read at once)."""


def tar_source(shards: Sequence[Path]) -> Source:
    """Open tar files as one source, in the order given."""

    def read(_: bool) -> Iterator[Record]:
        for shard in shards:
            yield from _read_shard(shard)

    return Source("webdataset", tuple(shards), read)


def sidecar_source(folder: Path) -> Source:
    """Open a folder of images, each beside a ``.txt`` or ``.json`` (img2dataset's ``files`` form)."""

    def read(_: bool) -> Iterator[Record]:
        for place in sorted(
            {file.parent for file in folder.rglob("*") if _ending(file.name) in IMAGE_ENDINGS}
        ):
            files = (
                (str(file.relative_to(folder)), file) for file in sorted(place.iterdir()) if file.is_file()
            )
            entries = [
                (name, path)
                for name, path in files
                if _ending(name) in (*IMAGE_ENDINGS, *_TEXT_ENDINGS, "json")
            ]
            yield from _records(place.name, ((*_split(name), path) for name, path in entries))

    return Source("sidecar", (folder,), read)


def _read_shard(shard: Path) -> Iterator[Record]:
    try:
        # A compressed tar has no offsets that a worker could use: its images are read here.
        compressed = not tarfile.is_tarfile(shard) or not _is_plain(shard)
        with tarfile.open(shard, "r:*" if compressed else "r:") as tar:
            yield from _records(shard.name, _members(tar, shard, inline=compressed))
            end = None if compressed else tar.offset
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        yield Record(shard.name, 0, problem=("source: tar file damaged", str(error)[:300]))
        return
    # tarfile takes a damaged header for the end of the archive, and the rest would be lost in silence.
    if end is not None:
        with shard.open("rb") as file:
            file.seek(end)
            block = file.read(tarfile.BLOCKSIZE)
        if block.strip(b"\0"):
            yield Record(shard.name, end, problem=("source: tar file damaged", f"no header at byte {end}"))


def _is_plain(shard: Path) -> bool:
    try:
        with tarfile.open(shard, "r:"):
            return True
    except tarfile.TarError:
        return False


def _members(tar: tarfile.TarFile, shard: Path, inline: bool) -> Iterator[_File]:
    for member in tar:
        # Without this, tarfile keeps every header it has seen: gigabytes for a large shard.
        tar.members = []  # type: ignore[attr-defined]
        if not member.isfile():
            continue
        key, ending = _split(member.name)
        if inline or ending not in IMAGE_ENDINGS:
            file = tar.extractfile(member)
            yield key, ending, file.read() if file else b""
        else:
            yield key, ending, Member(shard, member.offset_data, member.size)


def _records(source: str, files: Iterable[_File]) -> Iterator[Record]:
    for row, (_, group) in enumerate(groupby(files, key=lambda file: file[0])):
        content = {ending: place for _, ending, place in group}
        image = next((place for ending, place in content.items() if ending in IMAGE_ENDINGS), None)
        yield Record(source, row, image, _captions(row, content))


def _captions(row: int, content: dict[str, bytes | Path | Member]) -> tuple[tuple[int, object], ...]:
    fields = {}
    if "json" in content:
        try:
            fields = json.loads(_bytes(content["json"]))
        except (ValueError, RecursionError, OSError):
            fields = {}
    if isinstance(fields, dict) and isinstance(fields.get("captions"), list):
        return captions_of(row, fields["captions"])
    for ending in _TEXT_ENDINGS:
        if ending in content:
            return ((row, _bytes(content[ending])),)
    if isinstance(fields, dict):
        for name in CAPTION_COLUMNS:
            if name in fields:
                return captions_of(row, fields[name])
    return ()


def _bytes(place: bytes | Path | Member) -> bytes:
    if isinstance(place, Path):
        return place.read_bytes()
    assert isinstance(place, bytes)
    return place


def _split(name: str) -> tuple[str, str]:
    """Split at the first dot of the file's own name, as WebDataset does."""
    folder, slash, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return folder + slash + stem, ending.lower()


def _ending(name: str) -> str:
    return _split(name)[1]
