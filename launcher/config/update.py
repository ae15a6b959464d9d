"""The optimizer and the learning-rate schedule of a run, with every parameter explicit."""

import inspect
from typing import Any

from launcher.config.device import DeviceSupport
from launcher.config.known import quiet_deepspeed
from launcher.config.optimizers import optimizer_params, scheduler_class, scheduler_params
from launcher.config.training import OptimizerConfig, SchedulerConfig
from models.errors import UserError

AUTO = "auto"

_DEFAULT_PARAMS = {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.01}
_TORCH_EQUALS = {"adagrad": "Adagrad", "adam": "Adam", "adamw": "AdamW"}


def resolve_optimizer(
    data: dict[str, Any], device: DeviceSupport, notes: list[str], source: str
) -> OptimizerConfig:
    """Give the optimizer and write it into ``data``; AdamW where the file has none.

    On a CPU DeepSpeed's fused optimizers are replaced by torch's of the same update, which is noted.
    """
    section = data.get("optimizer")
    if section in (None, AUTO) or section.get("type") in (None, AUTO):
        section = {"type": "AdamW", "params": dict(_DEFAULT_PARAMS)}
        notes.append("optimizer is not given: AdamW with lr 0.001, weight_decay 0.01")
    name, params = section["type"], dict(section.get("params") or {})
    _fill_params(name, params, notes, source)
    lower = name.lower()
    torch_name, torch_params = _torch_equal(name, params)
    zero = data.get("zero_optimization") or {}
    # the optimizer of offloaded state is DeepSpeed's CPU kernel, which needs a C++ compiler only
    offloaded = isinstance(zero, dict) and bool(zero.get("offload_optimizer") or zero.get("cpu_offload"))
    if device.type == "cpu" or not device.fused_kernels:
        why = "on a cpu" if device.type == "cpu" else "without a CUDA toolkit to build DeepSpeed's own"
        if torch_name is None:
            raise UserError(f"{source}: optimizer {name} with these params has no kernel {why}; use AdamW")
        if lower in ("adam", "adamw") and not offloaded:
            if not params.get("torch_adam"):
                notes.append(f"{name} is torch.optim.{torch_name}, {why}")
            params = {"torch_adam": True, "adam_w_mode": torch_name == "AdamW", **torch_params}
    section = {**section, "type": name, "params": params}
    data["optimizer"] = section
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 1
    if stage and lower not in ("adam", "adamw"):
        # ZeRO shards any optimizer that works elementwise; DeepSpeed wants to hear that it is meant
        data.setdefault("zero_allow_untested_optimizer", True)
    return OptimizerConfig(name, params, torch_name, torch_params)


def resolve_scheduler(
    data: dict[str, Any], optimizer: OptimizerConfig, total_steps: int | None, notes: list[str], source: str
) -> SchedulerConfig | None:
    """Give the schedule, counted in optimizer steps, and write it into ``data``.

    ``total_steps`` of the plan replaces the file's ``total_num_steps``; a warm-up that would not end
    within it is shortened in proportion. Both are noted.
    """
    section = data.get("scheduler")
    if section in (None, AUTO) or section.get("type") in (None, AUTO):
        data.pop("scheduler", None)
        return None
    name, params = section["type"], dict(section.get("params") or {})
    known = scheduler_params(name)
    if "total_num_steps" in known:
        _total_steps(name, params, total_steps, notes, source)
    total = params.get("total_num_steps", total_steps)
    if params.get("warmup_num_steps") == AUTO:
        if total is None:
            raise UserError(f"{source}: scheduler.params.warmup_num_steps is 'auto'; write a number of steps")
        params["warmup_num_steps"] = max(1, total // 10)
        notes.append(f"warmup_num_steps 'auto': {params['warmup_num_steps']}, a tenth of the run")
    known_values = {"warmup_min_lr": 0.0, "warmup_max_lr": optimizer.torch_params.get("lr")}
    for key, value in list(params.items()):
        if value != AUTO:
            continue
        if known_values.get(key) is None:
            raise UserError(f"{source}: scheduler.params.{key} is 'auto'; write its value")
        params[key] = known_values[key]
        notes.append(f"scheduler.params.{key} 'auto': {params[key]}")
    _try_scheduler(name, params, source)
    section = {**section, "type": name, "params": params}
    data["scheduler"] = section
    return SchedulerConfig(name, params)


def _total_steps(
    name: str, params: dict[str, Any], total_steps: int | None, notes: list[str], source: str
) -> None:
    given = params.get("total_num_steps")
    if total_steps is None:
        if given in (None, AUTO):
            word = "is 'auto'" if given == AUTO else "is missing"
            raise UserError(
                f"{source}: scheduler.params.total_num_steps {word}, and the run has no number of steps; "
                "write it, or give --steps"
            )
        return
    params["total_num_steps"] = total_steps
    if given == total_steps:
        return
    if given == AUTO or given is None:
        notes.append(f"total_num_steps of {name}: {total_steps}, the steps of this run")
        return
    notes.append(f"total_num_steps of {name}: {total_steps}, the steps of this run, instead of {given}")
    warmup = params.get("warmup_num_steps")
    if isinstance(warmup, (int, float)) and total_steps <= warmup < given:
        params["warmup_num_steps"] = max(1, int(warmup * total_steps / given))
        notes.append(
            f"warmup_num_steps of {name}: {params['warmup_num_steps']} instead of {warmup}, which the run "
            "would not outlast"
        )


def _fill_params(name: str, params: dict[str, Any], notes: list[str], source: str) -> None:
    """Replace each 'auto' but the learning rate's by the optimizer's own default."""
    known = optimizer_params(name) or {}
    for key, value in list(params.items()):
        if value != AUTO and not (isinstance(value, list) and AUTO in value):
            continue
        default = known[key].default if key in known else None
        if key == "lr" or default is None or not isinstance(default, (bool, int, float, str, tuple)):
            raise UserError(
                f"{source}: optimizer.params.{key} is 'auto', which only Hugging Face's Trainer fills in; "
                "write the value"
            )
        params[key] = list(default) if isinstance(default, tuple) else default
        notes.append(f"optimizer.params.{key} 'auto': {params[key]}, the default of {name}")


def _torch_equal(name: str, params: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Give the class of torch.optim with the same update and its arguments; None where torch has none."""
    import torch

    lower = name.lower()
    torch_name = _TORCH_EQUALS.get(lower) or (name if hasattr(torch.optim, name) else None)
    if lower == "adam" and params.get("adam_w_mode", True):
        torch_name = "AdamW"  # DeepSpeed's Adam is AdamW unless adam_w_mode is false
    if lower in ("lamb", "lion") or lower.startswith("mu") or params.get("bias_correction") is False:
        torch_name = None
    if torch_name is None:
        return None, {"lr": params.get("lr", 0.001)}
    accepted = inspect.signature(getattr(torch.optim, torch_name)).parameters
    torch_params = {key: value for key, value in params.items() if key in accepted}
    if lower in ("adam", "adamw"):
        # DeepSpeed's kernels default to no weight decay, torch's AdamW to 0.01
        torch_params = {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.0} | torch_params
        if params.get("torch_adam") and "weight_decay" not in params and torch_name == "AdamW":
            torch_params["weight_decay"] = 0.01
    default_lr = accepted["lr"].default if "lr" in accepted else 0.001
    torch_params.setdefault("lr", default_lr)
    return torch_name, torch_params


def _try_scheduler(name: str, params: dict[str, Any], source: str) -> None:
    """Build the schedule on a throw-away optimizer: its own checks speak before any process starts."""
    import torch

    try:
        with quiet_deepspeed():
            weight = torch.nn.Parameter(torch.zeros(1))
            scheduler_class(name)(torch.optim.SGD([weight], lr=1.0, momentum=0.9), **params)
    except Exception as error:
        raise UserError(f"{source}: scheduler {name} refuses its params: {error}") from error
