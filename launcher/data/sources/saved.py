"""A data set that Hugging Face ``datasets`` saved to disk (``save_to_disk``), read by ``datasets`` itself."""

from collections.abc import Iterator
from pathlib import Path

from launcher.data.sources.columns import CAPTION_COLUMNS, captions_of, choose_column
from launcher.data.sources.parquet import IMAGE_COLUMNS, image_of
from launcher.data.sources.record import Record, Source
from models.errors import DataError


def is_saved(folder: Path) -> bool:
    """Tell whether ``datasets`` wrote this folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def saved_source(
    folder: Path, split: str | None, image_column: str | None, caption_column: str | None
) -> Source:
    """Open it; of several splits one must be named. Raises DataError."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: datasets cannot load it ({error})") from None
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"{folder}: choose one of its splits with --split: {', '.join(loaded)}")
        loaded = loaded[split]
    declared = [name for name, feature in loaded.features.items() if isinstance(feature, datasets.Image)]
    image_name = image_column or (
        declared[0] if declared else choose_column(folder, loaded.column_names, IMAGE_COLUMNS, "image")
    )
    caption_name = caption_column or choose_column(folder, loaded.column_names, CAPTION_COLUMNS, "caption")
    if image_name in declared:
        loaded = loaded.cast_column(image_name, datasets.Image(decode=False))

    def read(with_images: bool) -> Iterator[Record]:
        rows = loaded if with_images else loaded.select_columns([caption_name])
        for row, cells in enumerate(rows):
            image = image_of(cells[image_name], folder) if with_images else None
            yield Record(folder.name, row, image, captions_of(row, cells[caption_name]))

    files = tuple(sorted(folder.rglob("*.arrow")))
    settings = tuple(str(value) for value in (split, image_name, caption_name))
    return Source("datasets", files, read, settings, rows=len(loaded))
