"""Parquet in the form of Hugging Face ``datasets``: an image column and one with a caption or several.

Read with pyarrow rather than through ``datasets.load_dataset``, which first copies everything into its
cache and ends at the first bad file; the schema that ``datasets`` writes into the file is obeyed.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from launcher.data.sources.record import Record, Source
from models.errors import DataError, UserError

IMAGE_COLUMNS = (
    "image",
    "jpg",
    "png",
    "webp",
    "img",
    "image_bytes",
    "image_path",
    "file_name",
    "filepath",
    "path",
)
CAPTION_COLUMNS = ("caption", "captions", "text", "texts", "sentences", "title", "txt", "raw")
_ROWS_AT_ONCE = 64


def parquet_source(
    files: Sequence[Path], split: str | None, image_column: str | None, caption_column: str | None
) -> Source:
    """Open Parquet files as one source, in the order given."""
    rows = 0
    for file in files:
        try:
            rows += pq.read_metadata(file).num_rows
        except (pa.ArrowException, OSError):
            pass  # reported as a bad record when it is its turn

    def read(images: bool) -> Iterator[Record]:
        for file in files:
            yield from _read_file(file, split, image_column, caption_column, images)

    settings = tuple(str(value) for value in (split, image_column, caption_column))
    return Source("parquet", tuple(files), read, settings, rows=rows if split is None else None)


def _read_file(
    path: Path, split: str | None, image_column: str | None, caption_column: str | None, images: bool
) -> Iterator[Record]:
    row = 0
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            image_name = image_column or _image_column(path, schema)
            caption_name = caption_column or choose_column(path, schema.names, CAPTION_COLUMNS, "caption")
            for name in (image_name, caption_name):
                if name not in schema.names:
                    raise UserError(f"{path}: no column '{name}'; it has {', '.join(schema.names)}")
            filtered = split is not None and "split" in schema.names
            columns = [caption_name] + [image_name] * images + ["split"] * filtered
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
                table = batch.to_pydict()
                for index, value in enumerate(table[caption_name]):
                    if not filtered or table["split"][index] == split:
                        yield Record(
                            source=path.name,
                            row=row + index,
                            image=_image(table[image_name][index], path.parent) if images else None,
                            captions=captions_of(row + index, value),
                        )
                row += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        yield Record(
            path.name, row, problem=("source: Parquet file damaged", str(error).splitlines()[0][:300])
        )


def captions_of(row: int, value: object) -> tuple[tuple[int, object], ...]:
    """Spread a cell that holds several captions; each keeps its row."""
    if isinstance(value, dict) and "raw" in value:
        value = value["raw"]
    if isinstance(value, list | tuple):
        return tuple((row, item.get("raw") if isinstance(item, dict) else item) for item in value)
    return ((row, value),)


def choose_column(path: Path, names: Sequence[str], known: Sequence[str], what: str) -> str:
    """Give the first known name that the file has. Raises DataError naming the option to use."""
    for name in known:
        if name in names:
            return name
    raise DataError(f"{path}: no {what} column among {', '.join(names)}; name it with --{what}-column")


def _image_column(path: Path, schema: pa.Schema) -> str:
    """Give the column that the file's own ``datasets`` features declare an image, else a known name."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        declared = [name for name, feature in features.items() if feature.get("_type") == "Image"]
    except (KeyError, ValueError, AttributeError, TypeError):
        declared = []
    return declared[0] if declared else choose_column(path, schema.names, IMAGE_COLUMNS, "image")


def _image(value: object, folder: Path) -> bytes | Path | None:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        return folder / value
    return value if isinstance(value, bytes) else None
