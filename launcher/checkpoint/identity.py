"""What makes two runs the same: model, data and schedule. World size, ZeRO stage and partition are free."""

import json
from collections.abc import Sequence
from typing import Any

from launcher.plan import TrainPlan
from models.errors import UserError


def identity(plan: TrainPlan, data: str, seed: int, batch_memory: str | None) -> dict[str, Any]:
    """Give every key that a resumed run must share, flat: ``model.text.layers`` → 12."""
    config = plan.config
    nested = {
        "model": plan.spec.model_dump(mode="json"),
        "data": data,
        "seed": seed,
        "steps": plan.steps,
        "precision": config.precision_used,
        "global_batch_size": config.global_batch_size,
        "batch_memory": batch_memory,
        "gradient_clipping": config.gradient_clipping,
        "optimizer": {"type": config.optimizer.name, "params": config.optimizer.params},
        "scheduler": {"type": config.scheduler.name, "params": config.scheduler.params}
        if config.scheduler
        else None,
    }
    return dict(_flat("", json.loads(json.dumps(nested))))


def refuse_changes(
    path: str, before: dict[str, Any], now: dict[str, Any], allowed: Sequence[str]
) -> list[str]:
    """Give the changes that ``--allow-change`` names. Raises UserError with all others."""
    changes = {
        key: f"{key}: {before.get(key)!r} → {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }
    refused = [
        key for key in changes if not any(key == name or key.startswith(f"{name}.") for name in allowed)
    ]
    if refused:
        raise UserError(
            f"--resume {path}: this run is another one ({'; '.join(changes[key] for key in refused)}); restore "
            f"that, or accept it with {' '.join(f'--allow-change {key}' for key in refused)}"
        )
    return list(changes.values())


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [
            pair
            for key, inner in value.items()
            for pair in _flat(f"{prefix}.{key}" if prefix else str(key), inner)
        ]
    return [(prefix, value)]
