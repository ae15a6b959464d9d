"""Which precision a config asks for, and which one the device of this run can give."""

from typing import Any

from launcher.config.check import AUTOCAST_DTYPES
from launcher.config.device import DeviceSupport
from launcher.config.training import LossScale, Precision
from models.errors import UserError

AUTO = "auto"


def resolve_precision(
    data: dict[str, Any], device: DeviceSupport, notes: list[str], source: str
) -> tuple[Precision, Precision]:
    """Give (requested, used), and rewrite the precision sections of ``data`` to what is used.

    fp16 falls back to bf16 on a device without fp16, which is noted. Raises UserError for a precision
    that the device lacks and that has no near equal.
    """
    if "bfloat16" in data:
        section = data.pop("bfloat16")  # DeepSpeed reads the old name only where the new one is absent
        data.setdefault("bf16", section)
    _fill_auto(data, device, notes)
    for name in ("fp16", "bf16", "torch_autocast"):
        if name in data and data[name].get("enabled") is not True:
            del data[name]
    requested = _requested(data, device, notes)
    used = requested
    if requested.endswith("fp16") and not device.fp16:
        if not device.bf16:
            raise UserError(
                f"{source}: {device.type} supports neither fp16 nor bf16; use ds_configs/fp32.json"
            )
        used = "bf16" if requested == "fp16" else "autocast-bf16"
        notes.append(f"fp16 is not supported on this {device.type}: this run uses bf16")
        _to_bf16(data)
    elif requested.endswith("bf16") and not device.bf16:
        raise UserError(
            f"{source}: bf16 is not supported on this {device.type}; use fp16, with its loss scaling"
            if device.fp16
            else f"{source}: bf16 is not supported on this {device.type}; use ds_configs/fp32.json"
        )
    return requested, used


def loss_scale(data: dict[str, Any], used: Precision) -> LossScale | None:
    """Give the loss scaling: that of the fp16 section, or of torch's GradScaler for fp16 autocast."""
    if used == "autocast-fp16":
        # DeepSpeed builds torch.amp.GradScaler() with its defaults, which have neither hysteresis nor floor
        return LossScale(dynamic=True, initial=65_536.0, window=2000, hysteresis=1, minimum=0.0)
    if used != "fp16":
        return None
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    fp16 = DeepSpeedFP16Config(**data["fp16"])
    dynamic = fp16.loss_scale == 0
    return LossScale(
        dynamic=dynamic,
        initial=float(2**fp16.initial_scale_power) if dynamic else fp16.loss_scale,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        minimum=float(fp16.min_loss_scale),
    )


def _requested(data: dict[str, Any], device: DeviceSupport, notes: list[str]) -> Precision:
    if "torch_autocast" in data:
        section = data["torch_autocast"]
        dtype = AUTOCAST_DTYPES.get(section.get("dtype") or AUTO)
        if dtype is None:
            # Without a dtype torch takes its own, but DeepSpeed then leaves fp16 without a loss scaler.
            dtype = "float16" if device.type == "cuda" else "bfloat16"
            notes.append(f"torch_autocast.dtype is not given: {dtype}, torch's own choice on {device.type}")
        section["dtype"] = dtype
        return "autocast-fp16" if dtype == "float16" else "autocast-bf16"
    return "fp16" if "fp16" in data else "bf16" if "bf16" in data else "fp32"


def _fill_auto(data: dict[str, Any], device: DeviceSupport, notes: list[str]) -> None:
    """Choose for ``enabled: 'auto'``: bf16 where the device has it, else fp16, else neither."""
    sections = [name for name in ("fp16", "bf16") if name in data]
    open_names = [name for name in sections if data[name].get("enabled") == AUTO]
    if not open_names:
        return
    taken = any(data[name].get("enabled") is True for name in (*sections, "torch_autocast") if name in data)
    wanted = [name for name in ("bf16", "fp16") if name in open_names and getattr(device, name)]
    chosen = None if taken or not wanted else wanted[0]
    for name in open_names:
        data[name]["enabled"] = name == chosen
    keys = " and ".join(f"{name}.enabled" for name in open_names)
    notes.append(f"{keys} 'auto': this run uses {chosen or 'neither'}")


def _to_bf16(data: dict[str, Any]) -> None:
    if "torch_autocast" in data:
        data["torch_autocast"]["dtype"] = "bfloat16"
        return
    fp16 = data.pop("fp16")
    data["bf16"] = {"enabled": True}
    if fp16.get("fp16_master_weights_and_grads"):
        data["bf16"]["bf16_master_weights_and_grads"] = True
    types = data.get("data_types") or {}
    for section, keys in (
        (types, ("grad_accum_dtype", "param_dtype", "buffer_dtype")),
        (data, ("communication_data_type",)),
    ):
        for key in keys:
            if section.get(key) in ("fp16", "float16", "half", "torch.float16"):
                section[key] = "bf16"
