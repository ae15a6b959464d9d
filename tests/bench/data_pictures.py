"""Pictures and captions for the data bench: 640×480 JPEG of COCO's file size, captions of COCO's lengths."""

import json
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIZE = (640, 480)
_NOUNS = [
    "man",
    "woman",
    "dog",
    "cat",
    "train",
    "street",
    "table",
    "plate",
    "horse",
    "beach",
    "child",
    "bus",
    "kitchen",
    "field",
    "clock",
    "boat",
    "bird",
    "tree",
]
_VERBS = [
    "sitting",
    "standing",
    "riding",
    "holding",
    "eating",
    "walking",
    "looking",
    "playing",
    "lying",
    "flying",
]
_OTHER = [
    "a",
    "the",
    "on",
    "in",
    "with",
    "of",
    "and",
    "near",
    "next",
    "to",
    "white",
    "black",
    "red",
    "blue",
    "small",
    "large",
    "two",
    "several",
    "old",
    "wooden",
]


def make_folder(folder: Path, count: int) -> Path:
    """Write ``count`` pictures and metadata.jsonl, unless they are there."""
    pictures = folder / "all"
    if (folder / "metadata.jsonl").is_file():
        return folder
    pictures.mkdir(parents=True, exist_ok=True)
    with get_context("spawn").Pool() as pool:
        pool.starmap(_write, [(pictures, number) for number in range(count)], chunksize=50)
    lines = [
        json.dumps({"file_name": f"all/{number:06}.jpg", "caption": caption(number)})
        for number in range(count)
    ]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def caption(number: int) -> str:
    """Words of a caption: log-normal lengths, most 8 to 14 words and a few beyond 40, as alt-texts have."""
    rng = np.random.default_rng(number + 10**6)
    words = int(np.clip(rng.lognormal(2.35, 0.45), 4, 60))
    return " ".join(rng.choice((_NOUNS, _VERBS, _OTHER, _OTHER)[rng.integers(4)]) for _ in range(words))


def _write(folder: Path, number: int) -> None:
    """Clouds, shapes and sensor noise: together they take about the bytes that a photograph does."""
    rng = np.random.default_rng(number)
    clouds = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize(
        SIZE, Image.Resampling.BICUBIC
    )
    draw = ImageDraw.Draw(clouds)
    for _ in range(60):
        left, top = int(rng.integers(SIZE[0])), int(rng.integers(SIZE[1]))
        width, height = int(rng.integers(10, 120)), int(rng.integers(10, 120))
        colour = tuple(int(value) for value in rng.integers(0, 256, 3))
        (draw.ellipse if rng.integers(2) else draw.rectangle)(
            (left, top, left + width, top + height), fill=colour
        )
    noise = rng.integers(-14, 15, (SIZE[1], SIZE[0], 1), dtype=np.int16)
    pixels = np.clip(np.asarray(clouds, dtype=np.int16) + noise, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(folder / f"{number:06}.jpg", quality=88)
