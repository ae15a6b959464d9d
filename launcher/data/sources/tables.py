"""Text tables that name image files: JSONL, CSV (or TSV), a JSON list, ``metadata.*`` of an image folder.

Bytes that are not UTF-8 are kept as lone surrogates (``surrogateescape``): in a file name they still find
the file, in a caption they are reported by row. ``datasets`` would end the run at such a row.
"""

import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from launcher.data.sources.columns import CAPTION_COLUMNS, PATH_COLUMNS, captions_of, choose_column
from launcher.data.sources.record import Record, Source
from models.errors import DataError

TABLES = (".jsonl", ".ndjson", ".csv", ".tsv")
_DELIMITERS = ",\t|;"


def table_source(
    tables: Sequence[Path],
    images: Path | None,
    split: str | None,
    image_column: str | None,
    caption_column: str | None,
) -> Source:
    """Open tables as one source; paths in them are relative to ``images`` or to their table."""

    def read(_: bool) -> Iterator[Record]:
        for table in tables:
            folder = images or table.parent
            yield from merge(
                _record(table, folder, number, row, image_column, caption_column)
                for number, row in _rows(table)
                if isinstance(row, str) or split is None or row.get("split", split) == split
            )

    settings = tuple(str(value) for value in (images, split, image_column, caption_column))
    return Source("table", tuple(tables), read, settings)


def _rows(table: Path) -> Iterator[tuple[int, dict | str]]:
    """Give (line number, row), with a text that says what is wrong in place of a row that is none."""
    if table.suffix == ".json":
        yield from enumerate(read_json(table), start=1)
    elif table.suffix in (".csv", ".tsv"):
        yield from _csv_rows(table)
    else:
        yield from _jsonl_rows(table)


def _jsonl_rows(table: Path) -> Iterator[tuple[int, dict | str]]:
    with table.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                row = f"not JSON ({error})"
            yield number, row


def _csv_rows(table: Path) -> Iterator[tuple[int, dict | str]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with table.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        header = file.readline()
        delimiter = max(_DELIMITERS, key=header.count)
        names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
        choose_column(table, names, PATH_COLUMNS, "image")
        rows = csv.reader(file, delimiter=delimiter)
        while True:
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield rows.line_num + 1, f"not CSV ({error})"
                continue
            if not cells:
                continue
            if len(cells) != len(names):
                yield rows.line_num + 1, f"has {len(cells)} cells, the header {len(names)}"
            else:
                yield rows.line_num + 1, dict(zip(names, map(str.strip, cells), strict=True))


def _record(
    table: Path,
    folder: Path,
    number: int,
    row: object,
    image_column: str | None,
    caption_column: str | None,
) -> Record:
    if not isinstance(row, dict):
        detail = row if isinstance(row, str) else f"a {type(row).__name__}"
        return Record(table.name, number, problem=("row: unreadable", detail))
    image_name = image_column or next((name for name in PATH_COLUMNS if name in row), "")
    caption_name = caption_column or next((name for name in CAPTION_COLUMNS if name in row), "")
    name = row.get(image_name)
    if not isinstance(name, str) or not name:
        return Record(table.name, number, problem=("row: names no image", ""))
    return Record(table.name, number, folder / name, captions_of(number, row.get(caption_name)))


def merge(records: Iterable[Record]) -> Iterator[Record]:
    """Join neighbouring rows of the same image file, so that it is decoded once."""

    def image(record: Record) -> object:
        return record.image if record.problem is None else record

    for _, group in groupby(records, image):
        rows = list(group)
        captions = tuple(caption for row in rows for caption in row.captions)
        yield Record(rows[0].source, rows[0].row, rows[0].image, captions, rows[0].problem)


def read_json(path: Path) -> list | dict:
    """Read a JSON file that lists everything at once. Raises DataError: without it there is no data."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig", errors="surrogateescape"))
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"{os.fspath(path)}: not JSON ({error})") from None
