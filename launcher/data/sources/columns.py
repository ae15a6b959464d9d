"""Names under which the field's data sets keep images and captions."""

from collections.abc import Sequence
from pathlib import Path

from models.errors import DataError

IMAGE_COLUMNS = ("image", "jpg", "png", "webp", "img", "image_bytes")
PATH_COLUMNS = ("file_name", "image", "image_path", "filepath", "path", "filename", "image_name", "img")
CAPTION_COLUMNS = ("caption", "captions", "text", "texts", "sentences", "comment", "title", "txt", "raw")


def choose_column(path: Path, names: Sequence[str], known: Sequence[str], what: str) -> str:
    """Give the first known name that the file has. Raises DataError naming the option to use."""
    for name in known:
        if name in names:
            return name
    raise DataError(f"{path}: no {what} column among {', '.join(names)}; name it with --{what}-column")


def captions_of(row: int, value: object) -> tuple[tuple[int, object], ...]:
    """Give (row, caption) pairs of a cell that holds one caption, a list of them, or COCO's ``raw`` texts."""
    if isinstance(value, dict) and "raw" in value:
        value = value["raw"]
    if isinstance(value, list | tuple):
        return tuple((row, item.get("raw") if isinstance(item, dict) else item) for item in value)
    return ((row, value),)
