"""Annotation files of the field's benchmarks: COCO captions, Karpathy's splits, Flickr30k's token file."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from launcher.data.sources.columns import captions_of
from launcher.data.sources.record import Record, Source
from launcher.data.sources.tables import merge, read_json, table_source
from models.errors import DataError

_TOKEN_LINE = re.compile(r"(?P<image>.+?)#(?P<number>\d+)\s+(?P<caption>.*)", re.DOTALL)


def json_source(
    path: Path,
    images: Path | None,
    split: str | None,
    image_column: str | None,
    caption_column: str | None,
) -> Source:
    """Open a JSON file: COCO's or Karpathy's form, or a list of rows as ALBEF and BLIP have it."""
    content = read_json(path)
    if isinstance(content, list):
        return table_source([path], images, split, image_column, caption_column)
    listed = content.get("images") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise DataError(f"{path}: neither a list of rows nor COCO captions with 'images' and 'annotations'")
    folders = image_folders(path, images)
    if isinstance(content.get("annotations"), list):
        records = list(_coco_records(path, folders, listed, content["annotations"]))
    else:
        records = list(_karpathy_records(path, folders, listed, split))
    return Source("coco", (path,), lambda _: iter(records), (str(images), str(split)), rows=len(records))


def image_folders(path: Path, images: Path | None) -> list[Path]:
    """Give the folders where the images of an annotation file may lie, likeliest first."""
    if images:
        return [images]
    # annotations/captions_train2017.json belongs to train2017/ beside annotations/
    name = path.stem.rpartition("_")[2]
    parents = (path.parent, path.parent.parent)
    near = [
        parent / folder for parent in parents for folder in (name, "images", "Images", "flickr30k-images")
    ]
    return [folder for folder in near if folder.is_dir()] + [path.parent]


def _find(folders: Iterable[Path], name: str) -> Path:
    places = [folder / name for folder in folders]
    return next((place for place in places if place.exists()), places[0])


def _coco_records(path: Path, folders: list[Path], images: list, annotations: list) -> Iterator[Record]:
    captions: dict[object, list[tuple[int, object]]] = {}
    known = {image.get("id") for image in images if isinstance(image, dict)}
    strays = []
    for row, annotation in enumerate(annotations):
        number = annotation.get("image_id") if isinstance(annotation, dict) else None
        if number is None or number not in known:
            strays.append(Record(path.name, row, problem=("row: names no image", f"annotation {row}")))
        else:
            captions.setdefault(number, []).append((row, annotation.get("caption")))
    for row, image in enumerate(images):
        name = image.get("file_name") if isinstance(image, dict) else None
        if not isinstance(name, str) or not name:
            lost = tuple(captions.get(image.get("id"), ())) if isinstance(image, dict) else ()
            yield Record(path.name, row, captions=lost, problem=("row: names no image", f"image {row}"))
        else:
            yield Record(path.name, row, _find(folders, name), tuple(captions.get(image["id"], ())))
    yield from strays


def _karpathy_records(path: Path, folders: list[Path], images: list, split: str | None) -> Iterator[Record]:
    for row, image in enumerate(images):
        if not isinstance(image, dict) or not isinstance(image.get("filename"), str):
            yield Record(path.name, row, problem=("row: names no image", f"image {row}"))
        elif split is None or image.get("split", split) == split:
            name = str(Path(str(image.get("filepath", ""))) / image["filename"])
            yield Record(path.name, row, _find(folders, name), captions_of(row, image.get("sentences") or []))


def is_token_file(path: Path) -> bool:
    """Tell whether a text file has lines ``image.jpg#0<TAB>caption``, as Flickr8k and Flickr30k have."""
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        return bool(_TOKEN_LINE.fullmatch(file.readline()))


def token_source(path: Path, images: Path | None) -> Source:
    """Open Flickr30k's ``results_20130124.token``."""
    folders = image_folders(path, images)

    def rows() -> Iterator[Record]:
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                match = _TOKEN_LINE.fullmatch(line)
                if match is None:
                    yield Record(path.name, number, problem=("row: unreadable", line[:100]))
                else:
                    yield Record(
                        path.name, number, _find(folders, match["image"]), ((number, match["caption"]),)
                    )

    return Source("flickr", (path,), lambda _: merge(rows()), (str(images),))
