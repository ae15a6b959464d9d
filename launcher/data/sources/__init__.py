"""Sources of image-text pairs; ``open_source`` tells the format from the files themselves."""

from pathlib import Path

from launcher.data.sources.parquet import parquet_source
from launcher.data.sources.record import Member, Record, Source, read_image
from launcher.data.sources.tables import jsonl_source
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
    """Open a file or folder of image-text data; see README for the forms. Raises DataError.

    ``split``: keep the rows whose ``split`` says so, or the files named after it. ``images``: the folder
    that image paths are relative to, where it is not the listing's own.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if path.is_dir():
        if (path / "metadata.jsonl").is_file():
            return jsonl_source(
                path / "metadata.jsonl", Path(images or path), split, image_column, caption_column
            )
        parquets = sorted(path.rglob("*.parquet"))
        if parquets:
            return parquet_source(parquets, split, image_column, caption_column)
    if path.suffix == ".parquet":
        return parquet_source([path], split, image_column, caption_column)
    if path.suffix == ".jsonl":
        return jsonl_source(path, Path(images or path.parent), split, image_column, caption_column)
    raise DataError(f"{path}: not a form that vlfit reads")
