"""A store of random pictures and captions of a model's sizes, for benches that do not need to learn."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from launcher.data.pack import pack
from models.spec import ModelSpec


def synthetic_store(folder: Path, spec: ModelSpec, samples: int) -> Path:
    """Write and pack ``samples`` pictures with captions that fill the model's text length."""
    random = np.random.default_rng(0)
    source = folder / "source"
    source.mkdir(parents=True)
    words = [f"w{number}" for number in range(500)]
    lines = []
    for number in range(samples):
        pixels = random.integers(0, 256, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((spec.image.size,) * 2).save(source / f"{number}.jpg")
        text = f"{number} " + " ".join(random.choice(words, spec.text.length))
        lines.append(json.dumps({"file_name": f"{number}.jpg", "text": text}))
    (source / "metadata.jsonl").write_text("\n".join(lines))
    sizes = {
        "image_size": spec.image.size,
        "max_length": spec.text.length,
        "vocab_size": spec.text.vocab_size,
    }
    return pack(source, folder / "store", **sizes).store
