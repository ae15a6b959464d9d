"""Which keys the installed DeepSpeed reads, found by asking it.

DeepSpeed's top level is no schema: functions pick keys out of a dict. So ``DeepSpeedConfig`` is built
once on a dict that records every key that is looked up, with its default value. Sections that are
pydantic models are described by their fields, ``params`` by the signature of the class they are for.
Only where a section lives is written down here; what is in it is DeepSpeed's own word.
"""

import importlib
import importlib.util
import inspect
import logging
import re
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pydantic

MISSING = object()
"""Default of a key for which DeepSpeed states none."""


@dataclass
class Key:
    """One key that DeepSpeed reads: its default, the type that its value must have, and keys below it."""

    default: Any = MISSING
    annotation: Any = Any
    """Type of the value; Any where DeepSpeed does not say."""
    keys: "dict[str, Key] | None" = None
    """Known keys of a section; None for a plain value and for a section that is free-form."""
    model: type[pydantic.BaseModel] | None = None
    """The class that validates the section, if there is one."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other spellings of keys in ``keys``."""


# Sections that DeepSpeed turns into a pydantic model with Model(**section).
_MODELS = {
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "bfloat16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "comms_logger": ("deepspeed.comm.config", "CommsLoggerConfig"),
    "hybrid_engine": ("deepspeed.runtime.config", "HybridEngineConfig"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
    "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
    "weight_quantization": ("deepspeed.inference.config", "WeightQuantConfig"),
    "timers.throughput": ("deepspeed.utils.config", "DeepSpeedThroughputTimerConfig"),
}

# What must be present for DeepSpeed to look further down; the leaves are found by recording.
_PROBE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": False,
    "optimizer": {"type": ""},
    "scheduler": {"type": ""},
    "torch_autocast": {},
    "activation_checkpointing": {},
    "flops_profiler": {},
    "autotuning": {"model_info": {}},
    "aio": {},
    "checkpoint": {"writer": {}, "parallel_write": {}},
    "data_types": {},
    "expert_parallel": {"enabled": False},
    "timers": {},
    "data_efficiency": {
        "data_sampling": {"curriculum_learning": {}, "dynamic_batching": {}},
        "data_routing": {"random_ltd": {}},
    },
}

# Sections that DeepSpeed copies whole and reads much later, under names from a module of constants.
_CONSTANTS = {
    "data_efficiency.data_sampling.curriculum_learning": "CURRICULUM_LEARNING_",
    "data_efficiency.data_sampling.dynamic_batching": "DYNAMIC_BATCHING_",
    "data_efficiency.data_routing.random_ltd": "RANDOM_LTD_",
}


@cache
def known_keys() -> Key:
    """Give the tree of all keys that the installed DeepSpeed reads."""
    root = _record(_PROBE)
    assert root.keys is not None
    for path, (module, name) in _MODELS.items():
        model = getattr(importlib.import_module(module), name, None)
        if model is not None and (parent := _descend(root, path)) is not None:
            parent[path.split(".")[-1]] = _from_model(model)
    monitors = importlib.import_module("deepspeed.monitor.config").DeepSpeedMonitorConfig
    root.keys |= _from_model(monitors).keys or {}
    constants = vars(importlib.import_module("deepspeed.runtime.data_pipeline.constants"))
    for path, prefix in _CONSTANTS.items():
        parent = _descend(root, path)
        if parent is not None:
            section = parent[path.split(".")[-1]]
            section.keys = (section.keys or {}) | {
                value: Key()
                for name, value in constants.items()
                if name.startswith(prefix) and isinstance(value, str) and not name.endswith("_DEFAULT")
            }
    if "pipeline" in root.keys:
        root.keys["pipeline"].keys = _pipeline_keys()
    if "datastates_ckpt" in root.keys:
        root.keys["datastates_ckpt"] = Key()  # false, or an object that is copied whole
    for name in removed_keys():
        root.keys.pop(name, None)
    for name in ("data_parallel_size", "sequence_parallel_size"):  # read by deepspeed.initialize itself
        root.keys.setdefault(name, Key(annotation=int))
    return root


def removed_keys() -> dict[str, str]:
    """Give the keys that the installed DeepSpeed refuses because it dropped the feature, with its reason."""
    config = importlib.import_module("deepspeed.runtime.config")
    top = getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})
    zero = getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", {})
    return dict(top) | {f"zero_optimization.{key}": reason for key, reason in zero.items()}


@contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Keep DeepSpeed from logging while its classes are only asked, not used."""
    from deepspeed.utils import logger

    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def signature_keys(callables: list[Callable]) -> dict[str, Key]:
    """Give the parameters of callables as keys, without self, the optimizer and the model's parameters."""
    keys: dict[str, Key] = {}
    for function in callables:
        for number, parameter in enumerate(inspect.signature(function).parameters.values()):
            if number == 0 or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            default = MISSING if parameter.default is parameter.empty else parameter.default
            keys.setdefault(parameter.name, Key(default))
    return keys


class _Recorder(dict):
    """A dict that notes each key that is looked up in it, whether or not it is there."""

    def __init__(self, content: dict[str, Any]):
        super().__init__(
            {key: _Recorder(value) if isinstance(value, dict) else value for key, value in content.items()}
        )
        self.seen: dict[str, Any] = {}

    def _note(self, key: Any, default: Any = MISSING) -> None:
        if isinstance(key, str) and self.seen.get(key, MISSING) is MISSING:
            self.seen[key] = default

    def get(self, key: Any, default: Any = None) -> Any:
        self._note(key, default)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def keys(self) -> Any:  # DeepSpeed asks "X in param_dict.keys()"
        return self

    def __copy__(self) -> "_Recorder":
        return self

    def __bool__(self) -> bool:  # parse functions return early on an empty section
        return True


def _record(probe: dict[str, Any]) -> Key:
    from deepspeed.runtime.config import DeepSpeedConfig

    with quiet_deepspeed():
        recorder = _Recorder(probe)
        DeepSpeedConfig(recorder)
        old_style = _Recorder({**probe, "zero_optimization": True})  # the only reader of allgather_size
        DeepSpeedConfig(old_style)
    for key, default in old_style.seen.items():
        recorder._note(key, default)
    return _tree(recorder)


def _tree(recorder: _Recorder) -> Key:
    keys: dict[str, Key] = {}
    for name, default in recorder.seen.items():
        value = dict.get(recorder, name)
        section = _tree(value) if isinstance(value, _Recorder) else Key()
        section.default = default
        if section.keys is None:
            section.annotation = _type_of_default(default)
        keys[name] = section
    return Key(keys=keys, annotation=dict)


def _type_of_default(default: Any) -> Any:
    if default is MISSING or default is None or default == "auto" or isinstance(default, Enum):
        return Any
    # a whole-number default of a rate is an accident of spelling; DeepSpeed does arithmetic on both
    return type(default) if isinstance(default, (bool, int, float, str, dict, list)) else Any


def _from_model(model: type[pydantic.BaseModel]) -> Key:
    keys: dict[str, Key] = {}
    aliases: dict[str, str] = {}
    for name, info in model.model_fields.items():
        if info.exclude:
            continue  # set at run time
        inner = [part for part in _parts(info.annotation) if _is_model(part)]
        default = MISSING if info.is_required() else info.get_default(call_default_factory=True)
        keys[name] = _from_model(inner[0]) if inner else Key()
        keys[name].default, keys[name].annotation = default, info.annotation
        if info.alias:
            aliases[info.alias] = name
    return Key(annotation=dict, keys=keys, model=model, aliases=aliases)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)


def _parts(annotation: Any) -> tuple[Any, ...]:
    """Branches of a union; a single type is its own branch."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _descend(root: Key, path: str) -> dict[str, Key] | None:
    """Keys of the section that holds the last part of a dotted path; None if this DeepSpeed has no such."""
    keys = root.keys
    for part in path.split(".")[:-1]:
        keys = keys[part].keys if keys and part in keys else None
    return keys if keys is not None and path.split(".")[-1] in keys else None


def _pipeline_keys() -> dict[str, Key]:
    from deepspeed.runtime.config import get_pipeline_config

    keys = {
        name: Key(default, _type_of_default(default)) for name, default in get_pipeline_config({}).items()
    }
    origin = importlib.util.find_spec("deepspeed.runtime.pipe.engine")
    if origin and origin.origin:  # the engine reads more than there are defaults for
        text = Path(origin.origin).read_text(encoding="utf-8")
        for name in re.findall(r"_config\.pipeline(?:\[|\.get\()['\"](\w+)", text):
            keys.setdefault(name, Key())
    return keys
