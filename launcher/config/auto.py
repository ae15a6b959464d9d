"""'auto', the placeholder of Hugging Face's Trainer: what vlfit knows is filled in, the rest is refused."""

import enum
import json
from typing import Any

from launcher.config.known import MISSING, Key, known_keys
from models.errors import UserError

AUTO = "auto"


def fill_auto(data: dict[str, Any], source: str) -> list[str]:
    """Replace in ``data`` each 'auto' by DeepSpeed's default; gives "key → value" for each.

    Batch sizes, precision, optimizer and scheduler are not touched: their own modules resolve them.
    Raises UserError for an 'auto' that nothing says the value of.
    """
    filled: list[str] = []
    _fill(data, known_keys(), (), filled, source)
    return filled


_ELSEWHERE = {
    ("train_batch_size",),
    ("train_micro_batch_size_per_gpu",),
    ("gradient_accumulation_steps",),
    ("fp16", "enabled"),
    ("bf16", "enabled"),
    ("bfloat16", "enabled"),
    ("torch_autocast", "dtype"),
    ("optimizer",),
    ("scheduler",),
}


def _fill(section: dict[str, Any], known: Key, path: tuple[str, ...], filled: list[str], source: str) -> None:
    for name, value in list(section.items()):
        here = (*path, name)
        if here in _ELSEWHERE or known.keys is None:
            continue
        key = known.keys[known.aliases.get(name, name)]
        if isinstance(value, dict):
            _fill(value, key, here, filled, source)
        elif value == AUTO and key.default != AUTO:  # "auto" is a value of its own for a few keys
            if key.default is MISSING:
                raise UserError(
                    f"{source}: {'.'.join(here)} is 'auto', which only Hugging Face's Trainer fills in; "
                    "write the value"
                )
            default = key.default.value if isinstance(key.default, enum.Enum) else key.default
            if default is None or not isinstance(default, (bool, int, float, str)):
                del section[name]
                filled.append(f"{'.'.join(here)} left out")
            else:
                section[name] = default
                filled.append(f"{'.'.join(here)} {json.dumps(default)}")
