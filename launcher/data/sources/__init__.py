"""Sources of image-text pairs; ``open_source`` tells the form from the files themselves.

parquet       Hugging Face's image-caption form, img2dataset's ``parquet``
saved         a data set saved by Hugging Face ``datasets``
tables        JSONL, CSV, JSON lists; image folders with ``metadata.jsonl``
annotations   COCO captions, Karpathy's splits, Flickr30k's token file
shards        WebDataset tars, img2dataset's ``webdataset`` and ``files``
"""

from pathlib import Path

from launcher.data.sources.annotations import is_token_file, json_source, token_source
from launcher.data.sources.parquet import has_images, parquet_source
from launcher.data.sources.record import Member, Record, Source, read_image
from launcher.data.sources.saved import is_saved, saved_source
from launcher.data.sources.shards import IMAGE_ENDINGS, sidecar_source, tar_source
from launcher.data.sources.tables import TABLES, table_source
from models.errors import DataError

__all__ = ["Member", "Record", "Source", "open_source", "read_image"]


def open_source(
    path: str | Path,
    *,
    split: str | None = None,
    images: str | Path | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
) -> Source:
    """Open a file or folder of image-text data. Raises DataError where there is none.

    ``split`` keeps the rows whose ``split`` column says so, and the files named after it where names tell
    splits apart. ``images`` is the folder that image paths start from, where that is not the listing's own.
    """
    path = Path(path)
    folder = Path(images) if images else None
    if path.is_dir():
        return _open_folder(path, folder, split, image_column, caption_column)
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return parquet_source([path], folder, split, image_column, caption_column)
    if suffix == ".tar" or path.name.endswith((".tar.gz", ".tgz")):
        return tar_source([path])
    if suffix == ".json":
        return json_source(path, folder, split, image_column, caption_column)
    if suffix == ".token" or (suffix in (".txt", ".tsv") and is_token_file(path)):
        return token_source(path, folder)
    if suffix in TABLES:
        return table_source([path], folder, split, image_column, caption_column)
    raise DataError(
        f"{path}: cannot tell its form; give .parquet, .jsonl, .csv, .json, .token, .tar or a folder"
    )


def _open_folder(
    path: Path,
    images: Path | None,
    split: str | None,
    image_column: str | None,
    caption_column: str | None,
) -> Source:
    if is_saved(path):
        return saved_source(path, split, image_column, caption_column)
    if split and (path / split).is_dir():
        path = path / split
    tables = _named(path, split, *(f"metadata{suffix}" for suffix in TABLES))
    if tables:
        return table_source(tables, images, split, image_column, caption_column)
    tars = _named(path, split, "*.tar", "*.tar.gz", "*.tgz")
    if tars:
        return tar_source(tars)
    parquets = _named(path, split, "*.parquet")
    if any(map(has_images, parquets)):
        return parquet_source(parquets, images, split, image_column, caption_column)
    if any(file.suffix.lower().removeprefix(".") in IMAGE_ENDINGS for file in path.rglob("*")):
        return sidecar_source(path)
    if parquets:
        return parquet_source(parquets, images, split, image_column, caption_column)
    raise DataError(
        f"{path}: holds no data that vlfit reads; it looks for metadata.jsonl, *.tar, *.parquet, "
        "and images beside .txt or .json"
    )


def _named(folder: Path, split: str | None, *patterns: str) -> list[Path]:
    """Find files by pattern; where some are named after the split, only those (HF's train-00000-of-…)."""
    found = sorted(file for pattern in patterns for file in folder.rglob(pattern))
    of_split = [file for file in found if split and file.name.startswith(split)]
    return of_split or found
