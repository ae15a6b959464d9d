"""The demo's data: the Parquet that ships with the package, packed on first use into the user's cache."""

import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

from models.spec import ModelSpec


def demo_stores(spec: ModelSpec, root: Path | None = None) -> Path:
    """Give a folder with ``train`` and ``eval`` stores of the demo for this model; packs them once per size.

    Several ranks may call it at once: one packs, the others wait.
    """
    from launcher.data.pack import pack
    from launcher.demo import demo_parquet

    root = root or cache_root()
    vocabulary = min(4096, spec.text.vocab_size)
    # The content is part of the name: another release of the package may ship other data.
    content = hashlib.sha256(demo_parquet().read_bytes()).hexdigest()[:8]
    folder = root / f"demo-{content}-{spec.image.size}px-{spec.text.length}tokens-{vocabulary}words"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options: dict[str, Any] = {
            "image_size": spec.image.size,
            "max_length": spec.text.length,
            "vocab_size": vocabulary,
        }
        train = pack(demo_parquet(), folder / "train", split="train", **options)
        pack(
            demo_parquet(), folder / "eval", split="eval", tokenizer=train.store / "tokenizer.json", **options
        )
    return folder


def cache_root() -> Path:
    """Where vlfit keeps what it can make again: ``$XDG_CACHE_HOME/vlfit`` or ``~/.cache/vlfit``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlfit"
