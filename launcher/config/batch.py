"""Batch arithmetic: micro-batch × accumulation steps × world size = global batch."""

import json
from dataclasses import dataclass
from typing import Any

from models.errors import UserError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSizes:
    """Rows per step and how they are split; all three are positive and fit the world size."""

    micro: int
    accumulation: int
    train: int


def resolve_batch(data: dict[str, Any], world_size: int, source: str) -> BatchSizes:
    """Fill in the batch sizes that a config leaves open or 'auto', as DeepSpeed does, for ``world_size``.

    Raises UserError where they do not fit together; DeepSpeed itself rounds down and asserts later.
    """
    train, micro, steps = (_size(data, name, source) for name in (TRAIN, MICRO, STEPS))
    assumed = f"world size {world_size}: {world_size} data-parallel process{'es' * (world_size != 1)}"
    if train is None and micro is None:
        placeholders = [name for name in (TRAIN, MICRO) if data.get(name) == "auto"]
        why = f"{' and '.join(placeholders)} 'auto'" if placeholders else "no batch size"
        raise UserError(f"{source}: {why}: give a number for {MICRO} or {TRAIN} ({assumed})")
    if train is None:
        steps = steps or 1
        assert micro is not None
        return BatchSizes(micro, steps, micro * steps * world_size)
    if micro is None and steps is None:
        steps = 1
    per_rank, remainder = divmod(train, world_size * (micro or steps or 1))
    if remainder or per_rank == 0:
        divisor = f"{MICRO} {micro}" if micro else f"{STEPS} {steps}"
        raise UserError(
            f"{source}: {TRAIN} {train} cannot be split into {divisor} × {world_size} ({assumed}); "
            f"make it a multiple of {world_size * (micro or steps or 1)}, or change the number of processes"
        )
    micro, steps = micro or per_rank, steps or per_rank
    if train != micro * steps * world_size:
        raise UserError(
            f"{source}: {TRAIN} {train} is not {MICRO} {micro} × {STEPS} {steps} × {world_size} = "
            f"{micro * steps * world_size} ({assumed}); leave one of the three out"
        )
    return BatchSizes(micro, steps, train)


def _size(data: dict[str, Any], name: str, source: str) -> int | None:
    value = data.get(name)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
        raise UserError(f"{source}: {name} is {json.dumps(value)}; it must be a whole number of at least 1")
    return int(value)
