"""Makes small image-text data for the tests of launcher.data."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

COLOURS = ("red", "green", "blue", "black", "grey", "white", "orange", "purple")


def picture(number: int, size: tuple[int, int] = (48, 40)) -> Image.Image:
    """A picture that depends on ``number`` alone: smooth, so that JPEG keeps it."""
    rng = np.random.default_rng(number)
    coarse = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BILINEAR)


def encode(image: Image.Image, form: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def caption(number: int, which: int = 0) -> str:
    words = [
        COLOURS[(number + place * 3 + which) % len(COLOURS)] for place in range(1 + (number + which) % 7)
    ]
    return f"picture {number} with {' and '.join(words)}"


def write_folder(folder: Path, count: int, captions: int = 1) -> Path:
    """An image folder with metadata.jsonl, one line per caption."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        name = f"{number:04}.jpg"
        (folder / name).write_bytes(encode(picture(number)))
        lines += [
            json.dumps({"file_name": name, "text": caption(number, which)}) for which in range(captions)
        ]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_parquet(path: Path, count: int, extra: list[dict] | None = None, rows_per_group: int = 64) -> Path:
    """Hugging Face's form: image {bytes, path}, caption, split."""
    rows = [
        {
            "image": {"bytes": encode(picture(number)), "path": f"{number}.jpg"},
            "caption": caption(number),
            "split": "test" if number % 5 == 4 else "train",
        }
        for number in range(count)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows + (extra or [])), path, row_group_size=rows_per_group)
    return path


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by name."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
