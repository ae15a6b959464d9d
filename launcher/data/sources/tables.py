"""Text tables that name image files: JSONL, CSV, ``metadata.jsonl`` of an image folder."""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path

from launcher.data.sources.parquet import CAPTION_COLUMNS, captions_of
from launcher.data.sources.record import Record, Source

PATH_COLUMNS = ("file_name", "image", "image_path", "filepath", "path", "filename", "image_name", "img")


def _lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """Give (line number, text); text is None where a line is not UTF-8. A byte order mark is dropped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError:
                yield number, None


def jsonl_source(
    path: Path, images: Path, split: str | None, image_column: str | None, caption_column: str | None
) -> Source:
    """Open a JSONL file whose rows name an image file and hold one caption or a list of them."""

    def rows() -> Iterator[Record]:
        for number, text in _lines(path):
            if text is None:
                yield Record(path.name, number, problem=("row: not UTF-8", ""))
                continue
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                yield Record(path.name, number, problem=("row: not JSON", str(error)))
                continue
            if not isinstance(row, dict):
                yield Record(path.name, number, problem=("row: not a JSON object", type(row).__name__))
            elif split is None or row.get("split", split) == split:
                yield _row(path, images, number, row, image_column, caption_column)

    return Source(
        "jsonl",
        (path,),
        lambda _: merge(rows()),
        (str(split), str(image_column), str(caption_column), str(images)),
    )


def _row(
    path: Path, images: Path, number: int, row: dict, image_column: str | None, caption_column: str | None
) -> Record:
    image_name = image_column or next((name for name in PATH_COLUMNS if name in row), None)
    caption_name = caption_column or next((name for name in CAPTION_COLUMNS if name in row), None)
    name = row.get(image_name) if image_name else None
    if not isinstance(name, str) or not name:
        return Record(path.name, number, problem=("row: names no image", ""))
    value = row.get(caption_name) if caption_name else None
    return Record(path.name, number, images / name, captions_of(number, value))


def merge(records: Iterable[Record]) -> Iterator[Record]:
    """Join neighbouring rows of the same image file, so that it is decoded once."""
    keyed: Callable[[Record], object] = lambda record: record.image if record.problem is None else object()  # noqa: E731
    for _, group in groupby(records, keyed):
        rows = list(group)
        captions = tuple(caption for row in rows for caption in row.captions)
        yield Record(rows[0].source, rows[0].row, rows[0].image, captions, rows[0].problem)
