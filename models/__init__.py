"""Model side of vlfit: spec → layers → partition. Knows nothing of ``launcher``.

Public names load on first use, so that importing the package costs no torch import.
"""

import importlib
from typing import Any

_EXPORTS = {
    "ModelSpec": "models.spec",
    "load_spec": "models.spec",
    "build_layers": "models.build",
    "layer_names": "models.build",
    "Layer": "models.layer",
    "Objectives": "models.losses",
    "Targets": "models.losses",
    "State": "models.state",
    "PartitionSpec": "models.partition",
    "load_partition": "models.partition",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'models' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
