"""Results that are costly to trace, kept on disk under a hash of everything that they depend on."""

import hashlib
import json
import os
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from launcher.demo_data import cache_root

_SOURCES = Path(__file__).parent.parent.parent / "models"


def cached(kind: str, key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Give ``make()``, from the user's cache where an equal ``key`` was asked for before.

    The sources of the layers and the versions of the libraries belong to the key. A cache that cannot be
    written (a full or read-only home) is no error.
    """
    text = json.dumps([key, _versions()], sort_keys=True)
    path = cache_root() / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        made = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(made, separators=(",", ":")))
        os.replace(partial, path)
    except OSError:
        pass
    return made


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    digest = hashlib.sha256()
    for source in sorted([*_SOURCES.glob("*.py"), *Path(__file__).parent.glob("*.py")]):
        digest.update(source.read_bytes())
    return {"sources": digest.hexdigest()} | {
        name: version(name) for name in ("torch", "transformers", "timm")
    }
