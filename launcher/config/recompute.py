"""The activation_checkpointing section: its presence means "recompute every repeated block"."""

import json
from typing import Any

from launcher.config.device import DeviceSupport
from models.errors import UserError

SECTION = "activation_checkpointing"

_READ_BY = "only deepspeed.checkpointing reads it, and vlfit recomputes with torch.utils.checkpoint"


def resolve_recompute(data: dict[str, Any], device: DeviceSupport, source: str) -> bool:
    """Say whether blocks are recomputed; refuse options that would have no effect or fail in this run.

    Each option may be given with its default, as Hugging Face's examples do.
    """
    section = data.get(SECTION)
    if section is None:
        return False
    reasons = {
        "partition_activations": "it splits activations over model-parallel ranks, and this run has none",
        "cpu_checkpointing": "activations are in the CPU's memory already"
        if device.type == "cpu"
        else _READ_BY,
        "contiguous_memory_optimization": "it needs partition_activations, and so model-parallel ranks",
        "number_checkpoints": "it sizes the buffer of contiguous_memory_optimization, which is off",
        "synchronize_checkpoint_boundary": _READ_BY,
        "profile": _READ_BY,
    }
    for name, value in section.items():
        if value not in (None, False):
            reason = reasons.get(name, _READ_BY)
            raise UserError(
                f"{source}: {SECTION}.{name} is {json.dumps(value)}, which would have no effect or fail: "
                f"{reason}; remove it"
            )
    return True
