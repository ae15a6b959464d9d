"""Write a store out again: WebDataset tars, or Parquet that ``datasets`` loads as images with captions.

Decoded pictures are written as PNG, so packing the export gives the same pixels; encoded ones as their JPEG.
"""

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from launcher.data.store import Store
from models.errors import UserError

_ROWS_PER_FILE = 5_000
_ROWS_AT_ONCE = 100


def export(
    store: Store,
    out: str | Path,
    form: Literal["webdataset", "parquet"],
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write ``store`` into the new folder ``out``; gives the files. Raises UserError if it has content."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not an empty folder; choose another")
    out.mkdir(parents=True, exist_ok=True)
    write = {"webdataset": _write_webdataset, "parquet": _write_parquet}[form]
    files = []
    done = 0
    total = store.manifest.counts.images
    for path, count in write(store, out):
        if path not in files:
            files.append(path)
        done += count
        if progress:
            progress(done, total)
    return files


def _captions_of_images(store: Store) -> list[np.ndarray]:
    """Caption ids of each image, in the order of the samples."""
    by_image = np.argsort(store.image_ids, kind="stable")
    bounds = np.searchsorted(store.image_ids[by_image], np.arange(store.manifest.counts.images + 1))
    return [store.caption_ids[by_image[start:end]] for start, end in pairwise(bounds)]


def _file(store: Store, image_id: int) -> tuple[str, bytes]:
    """Give ending and content of an image file."""
    if store.manifest.keep == "encoded":
        return "jpg", store.encoded(image_id).tobytes()
    buffer = io.BytesIO()
    pixels = np.ascontiguousarray(store.image(image_id).transpose(1, 2, 0))
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=3)
    return "png", buffer.getvalue()


def _write_webdataset(store: Store, out: Path) -> Iterator[tuple[Path, int]]:
    captions = _captions_of_images(store)
    for start in range(0, len(captions), _ROWS_PER_FILE):
        path = out / f"{start // _ROWS_PER_FILE:05}.tar"
        with tarfile.open(path, "w") as tar:
            for image_id in range(start, min(start + _ROWS_PER_FILE, len(captions))):
                texts = [store.caption(number) for number in captions[image_id].tolist()]
                ending, data = _file(store, image_id)
                fields = json.dumps({"captions": texts}, ensure_ascii=False).encode()
                for name, content in ((ending, data), ("txt", texts[0].encode()), ("json", fields)):
                    member = tarfile.TarInfo(f"{image_id:09}.{name}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                yield path, 1


def _write_parquet(store: Store, out: Path) -> Iterator[tuple[Path, int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features = {
        "image": {"_type": "Image"},
        "captions": {"_type": "List", "feature": {"dtype": "string", "_type": "Value"}},
    }
    schema = pa.schema(
        [("image", image_type), ("captions", pa.list_(pa.string()))],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    captions = _captions_of_images(store)
    shards = -(-len(captions) // _ROWS_PER_FILE)
    for shard in range(shards):
        path = out / f"train-{shard:05}-of-{shards:05}.parquet"
        last = min((shard + 1) * _ROWS_PER_FILE, len(captions))
        with pq.ParquetWriter(path, schema) as writer:
            for start in range(shard * _ROWS_PER_FILE, last, _ROWS_AT_ONCE):
                rows = []
                for image_id in range(start, min(start + _ROWS_AT_ONCE, last)):
                    ending, data = _file(store, image_id)
                    texts = [store.caption(number) for number in captions[image_id].tolist()]
                    rows.append(
                        {"image": {"bytes": data, "path": f"{image_id:09}.{ending}"}, "captions": texts}
                    )
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                yield path, len(rows)
