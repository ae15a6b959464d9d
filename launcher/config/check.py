"""The closed schema: every key of a config must be one that DeepSpeed reads, with a value of its type."""

import enum
import json
import pathlib
import typing
from collections.abc import Iterable
from typing import Any

import pydantic

from launcher.config.known import Key, known_keys, quiet_deepspeed, removed_keys
from launcher.config.optimizers import optimizer_names, optimizer_params, scheduler_names, scheduler_params
from models.errors import UserError
from models.schema import nearest

AUTO = "auto"
"""Placeholder that Hugging Face's Trainer fills in; what vlfit can fill in, resolve() does."""


def check_config(data: dict[str, Any], source: str) -> None:
    """Check keys and values of a DeepSpeed config against what the installed DeepSpeed reads.

    Raises UserError with the full path of the key: unknown (with the nearest known key), removed from
    DeepSpeed, wrong type, a value that DeepSpeed's own class refuses, or a contradiction between sections.
    """
    for path, reason in removed_keys().items():
        if _has(data, path.split(".")):
            raise UserError(f"{source}: {path}: this DeepSpeed refuses it: {reason}")
    _check_section(data, known_keys(), (), source)
    _check_params(data, source)
    _check_precision(data, source)


def _check_section(section: dict[str, Any], known: Key, path: tuple[str, ...], source: str) -> None:
    if known.keys is None:
        return
    for name, value in section.items():
        key = known.keys.get(known.aliases.get(name, name))
        if key is None:
            raise UserError(_unknown(name, (*known.keys, *known.aliases), path, source))
        where = f"{source}: {'.'.join((*path, name))}"
        if name == "zero_optimization" and isinstance(value, bool):
            continue  # the old spelling of stage 1, which DeepSpeed still reads
        if key.keys is not None and value is not None:
            if value == AUTO and known.model is not None:
                continue  # DeepSpeed's own models drop such values; elsewhere a section must be an object
            if not isinstance(value, dict):
                raise UserError(f"{where} is {json.dumps(value)}; it must be an object")
            _check_section(value, key, (*path, name), source)
        elif value != AUTO:
            _check_type(value, key, where)
    if known.model is not None:
        _check_model(section, known.model, path, source)


def _unknown(name: str, known: Iterable[str], path: tuple[str, ...], source: str) -> str:
    full = ".".join((*path, name))
    message = f'{source}: unknown key "{full}"; {nearest(name, known)}'
    place = _place_of(name, known_keys(), ())
    return f'{message} ("{name}" is known as "{place}")' if place else message


def _place_of(name: str, section: Key, path: tuple[str, ...]) -> str | None:
    """Path of a section key that is spelled like ``name``, for a key that stands in the wrong section."""
    if path and name in (section.keys or {}):
        return ".".join((*path, name))
    for key, inner in (section.keys or {}).items():
        found = _place_of(name, inner, (*path, key)) if name != "enabled" else None
        if found:
            return found
    return None


def _check_type(value: Any, key: Key, where: str) -> None:
    if value is None and (key.default is None or key.annotation is Any):
        return
    needed = [_word(part) for part in _branches(key.annotation)]
    if (
        Any in _branches(key.annotation)
        or "" in needed
        or any(_fits(value, part) for part in _branches(key.annotation))
    ):
        return
    raise UserError(f"{where} is {json.dumps(value)}; it must be {' or '.join(dict.fromkeys(needed))}")


def _branches(annotation: Any) -> tuple[Any, ...]:
    """Types that a value may have, an enumeration standing for the types of its values."""
    found: list[Any] = []
    for part in typing.get_args(annotation) if _is_union(annotation) else (annotation,):
        if isinstance(part, type) and issubclass(part, enum.Enum):
            found += {type(member.value) for member in part}
        elif part is not type(None):
            found.append(typing.get_origin(part) or part)
    return tuple(found)


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.Union or type(annotation).__name__ == "UnionType"


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    pathlib.Path: "a string",
    list: "a list",
    tuple: "a list",
    dict: "an object",
}


def _word(kind: Any) -> str:
    return next(
        (word for base, word in _WORDS.items() if isinstance(kind, type) and issubclass(kind, base)), ""
    )


def _fits(value: Any, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return isinstance(value, bool) and kind is bool
    if issubclass(kind, int):
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())  # 5e8
    if issubclass(kind, float):
        return isinstance(value, (int, float))
    if issubclass(kind, (str, pathlib.Path)):
        return isinstance(value, str)
    if issubclass(kind, (list, tuple)):
        return isinstance(value, list)
    return isinstance(value, dict)


def _check_model(
    section: dict[str, Any], model: type[pydantic.BaseModel], path: tuple[str, ...], source: str
) -> None:
    """Let DeepSpeed's own class judge a section; like DeepSpeed, without the values that are 'auto'."""
    values = {name: value for name, value in section.items() if value != AUTO}
    try:
        with quiet_deepspeed():
            model(**values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join([*path, *(str(part) for part in first["loc"])])
        reason = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        raise UserError(f"{source}: {where}: {reason}") from None
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"{source}: {'.'.join(path)}: {' '.join(str(error).split())}") from None


def _check_params(data: dict[str, Any], source: str) -> None:
    """Check optimizer and scheduler: the name is one that DeepSpeed knows, params fit its signature."""
    for section, names, params_of in (
        ("optimizer", optimizer_names, optimizer_params),
        ("scheduler", scheduler_names, scheduler_params),
    ):
        value = data.get(section)
        if value in (None, AUTO):
            continue
        name, params = value.get("type"), value.get("params", {})
        if params is None or params == AUTO:
            params = {}
        if name is None or name == AUTO:
            continue
        if not isinstance(name, str) or not isinstance(params, dict):
            raise UserError(f"{source}: {section} needs a type (a string) and params (an object)")
        # DeepSpeed takes its own optimizers in any case, torch's and all schedules exactly
        known_names = names()
        folded = {known.lower() for known in known_names} if section == "optimizer" else set()
        if name not in known_names and name.lower() not in folded:
            hint = nearest(name, known_names).replace("key", "name")
            raise UserError(f'{source}: {section}.type "{name}" is not one that DeepSpeed knows; {hint}')
        known = params_of(name)
        for key in params:
            if section == "optimizer" and key == "max_grad_norm":
                raise UserError(
                    f"{source}: optimizer.params.max_grad_norm: DeepSpeed refuses it; "
                    "use the key gradient_clipping at the top level"
                )
            if known is not None and key not in known:
                raise UserError(
                    f'{source}: unknown key "{section}.params.{key}" for {name}; {nearest(key, known)}'
                )
        _check_param_values(params, f"{source}: {section}.params")


_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "alpha", "rho", "warmup_min_lr", "warmup_max_lr")
_COUNTS = ("total_num_steps", "warmup_num_steps")


def _check_param_values(params: dict[str, Any], where: str) -> None:
    for name, value in params.items():
        if value is None or value == AUTO or isinstance(value, list):
            continue
        if name in _NUMBERS and not _fits(value, float):
            raise UserError(f"{where}.{name} is {json.dumps(value)}; it must be a number")
        if name in _COUNTS and not _fits(value, int):
            raise UserError(f"{where}.{name} is {json.dumps(value)}; it must be a whole number")
    betas = params.get("betas")
    if betas is not None and betas != AUTO:
        good = isinstance(betas, list) and len(betas) == 2 and all(_fits(beta, float) for beta in betas)
        # Hugging Face's own examples write an "auto" inside the list
        if not good and AUTO not in (betas if isinstance(betas, list) else ()):
            raise UserError(f"{where}.betas is {json.dumps(betas)}; it must be a list of two numbers")


def _check_precision(data: dict[str, Any], source: str) -> None:
    half = {name: _enabled(data, name) for name in ("fp16", "bf16", "bfloat16")}
    if half["fp16"] and (half["bf16"] or half["bfloat16"]):
        raise UserError(f"{source}: fp16 and bf16 are both enabled; keep one")
    if _enabled(data, "torch_autocast"):
        for name, on in half.items():
            if on:
                raise UserError(
                    f"{source}: torch_autocast and {name} are both enabled; torch_autocast keeps fp32 "
                    f"parameters and {name} casts them: keep one"
                )
    autocast = data.get("torch_autocast")
    dtype = autocast.get("dtype") if isinstance(autocast, dict) else None
    if dtype not in (None, AUTO, *AUTOCAST_DTYPES):
        known = ", ".join(f'"{name}"' for name in ("float16", "bfloat16"))
        raise UserError(f"{source}: torch_autocast.dtype is {json.dumps(dtype)}; it must be one of {known}")


AUTOCAST_DTYPES = {
    **dict.fromkeys(("float16", "fp16", "half", "torch.float16"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), "bfloat16"),
}
"""Spellings that DeepSpeed's DtypeEnum takes, and torch's name for each."""


def _enabled(data: dict[str, Any], section: str) -> bool:
    value = data.get(section)
    return isinstance(value, dict) and value.get("enabled") is True


def _has(data: Any, path: list[str]) -> bool:
    for part in path:
        if not isinstance(data, dict) or part not in data:
            return False
        data = data[part]
    return True
