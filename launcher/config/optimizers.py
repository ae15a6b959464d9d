"""What ``optimizer.params`` and ``scheduler.params`` may hold: the signatures of the classes they are for."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from launcher.config.known import Key, signature_keys

# Which classes DeepSpeedEngine._configure_basic_optimizer builds for its own names (module, class).
_CLASSES = {
    "adam": (("deepspeed.ops.adam", "FusedAdam"), ("deepspeed.ops.adam", "DeepSpeedCPUAdam")),
    "adagrad": (("torch.optim", "Adagrad"), ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad")),
    "lamb": (("deepspeed.ops.lamb", "FusedLamb"),),
    "lion": (("deepspeed.ops.lion", "FusedLion"), ("deepspeed.ops.lion", "DeepSpeedCPULion")),
}
_CLASSES["adamw"] = _CLASSES["adam"]

ADAM_SWITCHES = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "foreach")
"""Keys that DeepSpeedEngine.get_optimizer_configuration takes out of the params of adam and adamw."""


@cache
def optimizer_names() -> tuple[str, ...]:
    """Give the names that the installed DeepSpeed accepts as ``optimizer.type``."""
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    shown = {"adam": "Adam", "adamw": "AdamW"}
    of_torch = [
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and name != "Optimizer"
    ]
    return tuple(dict.fromkeys([*(shown.get(name, name) for name in DEEPSPEED_OPTIMIZERS), *of_torch]))


@cache
def scheduler_names() -> tuple[str, ...]:
    """Give the names that the installed DeepSpeed accepts as ``scheduler.type``."""
    import torch
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    of_torch = [
        name
        for name, value in vars(torch.optim.lr_scheduler).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.lr_scheduler.LRScheduler)
        and not name.startswith("_")
        and name != "LRScheduler"
    ]
    return tuple(dict.fromkeys([*VALID_LR_SCHEDULES, *of_torch]))


def optimizer_params(name: str) -> dict[str, Key] | None:
    """Give the known params of an optimizer; None where there is no single signature (Muon, μP)."""
    lower = name.lower()
    if lower in _CLASSES:
        keys = signature_keys([_load(*place) for place in _CLASSES[lower]])
        if lower.startswith("adam"):
            # torch_adam builds torch's class instead
            others = (*signature_keys([_load("torch.optim", "AdamW")]), *ADAM_SWITCHES)
            keys = {key: Key() for key in others} | keys
        return keys
    if lower.startswith("mu"):
        return None
    return signature_keys([_load("torch.optim", name)])


def scheduler_params(name: str) -> dict[str, Key]:
    """Give the known params of a learning-rate schedule."""
    return signature_keys([scheduler_class(name)])


def scheduler_class(name: str) -> Callable[..., Any]:
    """Give the class that DeepSpeedEngine._scheduler_from_config builds for a name."""
    schedules = importlib.import_module("deepspeed.runtime.lr_schedules")
    return getattr(schedules, name, None) or _load("torch.optim.lr_scheduler", name)


def _load(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(module), name)
