"""DeepSpeed JSON in and out: a closed schema, one explicit plan for every engine, and ds_configs/.

    config = load_config("ds_configs/fp16_ckpt.json")
    training = config.resolve(world_size=2, device=DeviceSupport.detect())

Public names load on first use, so that importing the package costs no torch import.
"""

import importlib
from typing import Any

_EXPORTS = {
    "DeepSpeedJson": "launcher.config.load",
    "load_config": "launcher.config.load",
    "DeviceSupport": "launcher.config.device",
    "LossScale": "launcher.config.training",
    "OptimizerConfig": "launcher.config.training",
    "SchedulerConfig": "launcher.config.training",
    "TrainingConfig": "launcher.config.training",
    "resolve": "launcher.config.resolve",
    "CONFIGS": "launcher.config.generate",
    "render_configs": "launcher.config.generate",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'launcher.config' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
