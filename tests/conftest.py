"""What tests share: a tiny real model, a tiny real data set, and a process group in the test process."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

# Two ranks with two threads each on two cores spend their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TINY = {
    "name": "tiny",
    "image": {"timm": "vit_tiny_patch16_224", "size": 32, "patch": 16, "width": 32, "depth": 2, "heads": 2},
    "text": {
        **{"vocab_size": 128, "width": 32, "layers": 2, "heads": 2, "feed_forward": 64, "positions": 32},
        **{"length": 12, "dropout": 0.0, "attention_dropout": 0.0},
    },
    "fusion": {
        "layers": 2,
        "width": 32,
        "heads": 2,
        "feed_forward": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "objectives": {"itc": {"width": 16}, "itm": {"group": 4}, "mlm": {}},
}
"""Dropout 0, so that results can be compared between engines."""

WORDS = ("red", "green", "blue", "big", "small", "round", "square", "happy", "sad", "cat", "dog", "sun")


@pytest.fixture(scope="session")
def tiny_spec_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packed stores ``train`` (48 samples) and ``eval`` (16)."""
    from launcher.data.pack import pack

    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    tokenizer = None
    for split, count in (("train", 48), ("eval", 16)):
        source = folder / f"{split}-source"
        source.mkdir()
        lines = []
        for number in range(count):
            colour = random.integers(0, 256, 3).tolist()
            Image.new("RGB", (40, 40), tuple(colour)).save(source / f"{number}.png")
            words = " ".join(random.choice(WORDS, 4))
            lines.append(f'{{"file_name": "{number}.png", "text": "{words} {number}"}}')
        (source / "metadata.jsonl").write_text("\n".join(lines))
        result = pack(
            source, folder / split, image_size=32, max_length=12, vocab_size=128, tokenizer=tokenizer
        )
        tokenizer = result.store / "tokenizer.json"
    return folder


@pytest.fixture(scope="session")
def initialised() -> Iterator[dict[str, str]]:
    """torch.distributed of world size 1 in the test process, as a run initialises it; gives its variables."""
    import torch
    import torch.distributed as dist

    from launcher.distributed import Distributed
    from launcher.process_group import start_process_group

    saved = dict(os.environ)
    start_process_group(Distributed(0, 0, 1, 1, 0, 1, "127.0.0.1", 0, "python"), torch.device("cpu"))
    added = {name: value for name, value in os.environ.items() if saved.get(name) != value}
    # Left in place, RANK=0 and WORLD_SIZE=1 would reach the launchers that other tests start.
    os.environ.clear()
    os.environ.update(saved)
    yield added
    dist.destroy_process_group()


@pytest.fixture
def process_group(initialised: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process group with its variables set, for this test only."""
    for name, value in initialised.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
