"""From a DeepSpeed JSON to a TrainingConfig: what depends on world size, device and plan."""

from typing import Any

from launcher.config.auto import fill_auto
from launcher.config.batch import MICRO, STEPS, TRAIN, resolve_batch
from launcher.config.device import DeviceSupport
from launcher.config.known import known_keys, quiet_deepspeed
from launcher.config.load import DeepSpeedJson
from launcher.config.precision import loss_scale, resolve_precision
from launcher.config.recompute import resolve_recompute
from launcher.config.training import TrainingConfig
from launcher.config.update import resolve_optimizer, resolve_scheduler
from models.errors import UserError


def resolve(
    config: DeepSpeedJson, *, world_size: int, device: DeviceSupport, total_steps: int | None = None
) -> TrainingConfig:
    """Make a config explicit for ``world_size`` data-parallel ranks on ``device``.

    ``total_steps`` is the plan's number of optimizer steps; it replaces ``total_num_steps`` of the
    schedule. Raises UserError naming file and key: batch sizes that do not fit the world size, an 'auto'
    that nothing fills in, a precision that the device lacks, options that would have no effect or fail.
    """
    source = str(config.path)
    data = {name: value for name, value in config.data.items() if value is not None}
    notes: list[str] = []
    _refuse_other_parallelism(data, source)
    batch = resolve_batch(data, world_size, source)
    filled = [
        f"{name} {value}"
        for name, value in ((TRAIN, batch.train), (MICRO, batch.micro), (STEPS, batch.accumulation))
        if data.get(name) == "auto"
    ]
    data |= {TRAIN: batch.train, MICRO: batch.micro, STEPS: batch.accumulation}
    filled += fill_auto(data, source)
    if filled:
        notes.append(f"'auto' filled in: {', '.join(filled)}")
    requested, used = resolve_precision(data, device, notes, source)
    clipping = _gradient_clipping(data, notes, source)
    recompute = resolve_recompute(data, device, source)
    zero = _zero(data, device, notes, source)
    optimizer = resolve_optimizer(data, device, notes, source)
    scheduler = resolve_scheduler(data, optimizer, total_steps, notes, source)
    _let_deepspeed_check(data, source)
    return TrainingConfig(
        path=config.path,
        world_size=world_size,
        precision_requested=requested,
        precision_used=used,
        loss_scale=loss_scale(data, used),
        micro_batch_size=batch.micro,
        accumulation_steps=batch.accumulation,
        global_batch_size=batch.train,
        gradient_clipping=clipping,
        optimizer=optimizer,
        scheduler=scheduler,
        zero_stage=int(zero.stage),
        offload_optimizer=_device_of(zero.offload_optimizer),
        offload_param=_device_of(zero.offload_param),
        recompute=recompute,
        notes=tuple(notes),
        _deepspeed=data,
    )


def _refuse_other_parallelism(data: dict[str, Any], source: str) -> None:
    """Refuse what would make several ranks share rows: the batch arithmetic and the data order would lie."""
    tensor = (data.get("tensor_parallel") or {}).get("autotp_size", 0)
    for key, size in (
        ("sequence_parallel_size", data.get("sequence_parallel_size", 1)),
        ("tensor_parallel.autotp_size", tensor),
    ):
        if isinstance(size, int) and size > 1:
            raise UserError(
                f"{source}: {key} is {size}, but every rank of vlfit trains on its own rows; set 1"
            )
    if data.get("managed_gradient_accumulation") is False:
        raise UserError(
            f"{source}: managed_gradient_accumulation is false, but vlfit lets DeepSpeed accumulate; "
            "remove it"
        )
    if (data.get("expert_parallel") or {}).get("enabled") is True:
        raise UserError(f"{source}: expert_parallel is enabled, but the model has no experts; remove it")


def _gradient_clipping(data: dict[str, Any], notes: list[str], source: str) -> float:
    if data.get("gradient_clipping") is None:
        assert known_keys().keys is not None
        default = known_keys().keys["gradient_clipping"].default  # type: ignore[index]
        data["gradient_clipping"] = default
        notes.append(f"gradient_clipping is not given: {default}, the default of the installed DeepSpeed")
    clipping = data["gradient_clipping"]
    if clipping < 0:
        raise UserError(f"{source}: gradient_clipping is {clipping}; it must be at least 0 (0 turns it off)")
    return float(clipping)


def _zero(data: dict[str, Any], device: DeviceSupport, notes: list[str], source: str) -> Any:
    """Give DeepSpeed's own reading of the ZeRO section, after leaving out what a CPU has no use for."""
    from deepspeed.runtime.zero.config import get_zero_config

    with quiet_deepspeed():
        zero = get_zero_config(data)
        if device.type == "cpu":
            section = data.get("zero_optimization")
            for name, old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
                if isinstance(section, dict) and _device_of(getattr(zero, name)) == "cpu":
                    section.pop(name, None)
                    section.pop(old, None)
                    notes.append(f"{name} is left out: the device of this run is the cpu itself")
            zero = get_zero_config(data)
    if _device_of(zero.offload_param) != "none" and zero.stage != 3:
        raise UserError(
            f"{source}: zero_optimization.offload_param needs stage 3, but stage is {int(zero.stage)}"
        )
    if _device_of(zero.offload_optimizer) != "none" and zero.stage == 0:
        raise UserError(f"{source}: zero_optimization.offload_optimizer needs stage 1, 2 or 3; stage is 0")
    return zero


def _device_of(offload: Any) -> Any:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def _let_deepspeed_check(data: dict[str, Any], source: str) -> None:
    """Let DeepSpeed's own class read the explicit config, so that it refuses before any process starts."""
    from deepspeed.runtime.config import DeepSpeedConfig

    # without a process group DeepSpeed takes a world of 1, for which train_batch_size need not fit
    alone = {name: value for name, value in data.items() if name != TRAIN}
    try:
        with quiet_deepspeed():
            DeepSpeedConfig(alone)
    except Exception as error:
        raise UserError(f"{source}: DeepSpeed refuses it: {' '.join(str(error).split())}") from error
