"""Parquet in the form of Hugging Face ``datasets``: an image column and one with a caption or several.

Read with pyarrow rather than through ``datasets.load_dataset``, which first copies everything into its
cache and ends at the first bad file; the features that ``datasets`` writes into the schema are obeyed.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from launcher.data.sources.columns import (
    CAPTION_COLUMNS,
    IMAGE_COLUMNS,
    PATH_COLUMNS,
    captions_of,
    choose_column,
)
from launcher.data.sources.record import Record, Source
from models.errors import DataError

_ROWS_AT_ONCE = 64


def parquet_source(
    files: Sequence[Path],
    images: Path | None,
    split: str | None,
    image_column: str | None,
    caption_column: str | None,
) -> Source:
    """Open Parquet files as one source, in the order given."""
    rows = 0
    for file in files:
        with contextlib.suppress(pa.ArrowException, OSError):  # a bad record when it is its turn
            rows += pq.read_metadata(file).num_rows
            schema = pq.read_schema(file)
            if file == files[0]:  # of wrong use, rather than of one bad file among many, say so at once
                image_column or choose_image_column(file, schema)
                caption_column or choose_column(file, schema.names, CAPTION_COLUMNS, "caption")

    def read(with_images: bool) -> Iterator[Record]:
        for file in files:
            yield from _read_file(
                file, images or file.parent, split, image_column, caption_column, with_images
            )

    settings = tuple(str(value) for value in (images, split, image_column, caption_column))
    return Source("parquet", tuple(files), read, settings, rows=rows if split is None else None)


def has_images(path: Path) -> bool:
    """Tell whether a Parquet file has an image column of its own (img2dataset also writes some without)."""
    try:
        choose_image_column(path, pq.read_schema(path))
    except (DataError, pa.ArrowException, OSError):
        return False
    return True


def choose_image_column(path: Path, schema: pa.Schema) -> str:
    """Give the column that the file's own ``datasets`` features declare an image, else a known name."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        declared = [name for name, feature in features.items() if feature.get("_type") == "Image"]
    except (KeyError, ValueError, AttributeError, TypeError):
        declared = []
    return (
        declared[0] if declared else choose_column(path, schema.names, IMAGE_COLUMNS + PATH_COLUMNS, "image")
    )


def image_of(value: object, folder: Path) -> bytes | Path | None:
    """Give the image in a cell: bytes, a path, or ``{"bytes", "path"}`` of which one may be None."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        return folder / value
    return value if isinstance(value, bytes) else None


@dataclass(frozen=True)
class _Columns:
    image: str
    caption: str
    split: str | None
    """Name of the column of splits; None where all rows are wanted."""


def _read_file(
    path: Path,
    folder: Path,
    split: str | None,
    image_name: str | None,
    caption_name: str | None,
    with_images: bool,
) -> Iterator[Record]:
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            columns = _Columns(
                image_name or choose_image_column(path, schema),
                caption_name or choose_column(path, schema.names, CAPTION_COLUMNS, "caption"),
                "split" if split is not None and "split" in schema.names else None,
            )
            missing = {columns.image, columns.caption} - set(schema.names)
            if missing:
                raise DataError(f"{path}: no column {missing.pop()!r}; it has {', '.join(schema.names)}")
            row = 0
            for group in range(file.num_row_groups):
                yield from _read_group(file, path, group, row, folder, split, columns, with_images)
                row += file.metadata.row_group(group).num_rows
    except DataError as error:
        rows = pq.read_metadata(path).num_rows
        yield Record(path.name, 0, problem=("source: Parquet column missing", str(error)), lost=max(1, rows))
    except (pa.ArrowException, OSError) as error:
        yield Record(path.name, 0, problem=("source: Parquet file damaged", _first_line(error)))


def _read_group(
    file: pq.ParquetFile,
    path: Path,
    group: int,
    first: int,
    folder: Path,
    split: str | None,
    columns: _Columns,
    with_images: bool,
) -> Iterator[Record]:
    """Read a row group; damage costs the rest of the group, not of the file."""
    names = [columns.caption] + [columns.image] * with_images + ([columns.split] if columns.split else [])
    row, end = first, first + file.metadata.row_group(group).num_rows
    try:
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=[group], columns=names):
            cells = {name: _cells(batch.column(name)) for name in set(names)}
            for index in range(batch.num_rows):
                if columns.split and cells[columns.split][index] != split:
                    continue
                image = image_of(cells[columns.image][index], folder) if with_images else None
                captions = captions_of(row + index, cells[columns.caption][index])
                yield Record(path.name, row + index, image, captions)
            row += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        yield Record(
            path.name, row, problem=("source: Parquet file damaged", _first_line(error)), lost=end - row
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _cells(column: pa.Array) -> list:
    """Convert to Python values; text that is not UTF-8 stays bytes, so that only its row is left out."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            large = pa.types.is_large_string(column.type)
            return column.view(pa.large_binary() if large else pa.binary()).to_pylist()
        return [_cell(column, index) for index in range(len(column))]


def _cell(column: pa.Array, index: int) -> object:
    try:
        return column[index].as_py()
    except UnicodeDecodeError:
        return b"\xff"
