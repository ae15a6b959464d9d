"""Where DeepSpeed 0.19 keeps weights, gradient norm and loss scale: it depends on precision and ZeRO stage."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.errors import UserError
from models.layer import Layer


def read_tensors(engine: Any, layers: Sequence[Layer], keep: bool) -> dict[str, Tensor]:
    """Give weights (fp32 masters) and buffers of ``layers`` on the CPU, keyed by layer name.

    Collective over the data-parallel ranks; empty on those that do not ``keep`` them.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    found: dict[str, Tensor] = {}
    masters = _unsharded_masters(engine.optimizer)
    for layer in layers:
        for key, parameter in layer.module.named_parameters():
            full = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            if full is None:
                full = masters.get(id(parameter))
            if full is None:
                full = _gathered(parameter)
            if keep:
                found[f"{layer.name}/{key}"] = full.detach().float().cpu().clone()
        if keep:
            found |= {f"{layer.name}/{key}": value.cpu().clone() for key, value in _buffers(layer).items()}
    return found


@torch.no_grad()
def write_tensors(engine: Any, layers: Sequence[Layer], tensors: dict[str, Tensor]) -> None:
    """Load weights and buffers into ``layers``, master copies included. Collective as ``read_tensors`` is."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    masters = _unsharded_masters(engine.optimizer)
    for layer in layers:
        for key, parameter in layer.module.named_parameters():
            value = tensors[f"{layer.name}/{key}"].to(parameter.device)
            with GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")):
                parameter.data.copy_(value)
            if parameter.requires_grad and hasattr(parameter, "ds_id"):
                safe_set_local_fp32_param(parameter, shard_of(parameter, value.float()))
            elif parameter.requires_grad and hasattr(parameter, "_hp_mapping"):
                safe_set_full_fp32_param(parameter, value.float())
            if id(parameter) in masters:
                masters[id(parameter)].copy_(value)
        for key, buffer in _buffers(layer).items():
            buffer.copy_(tensors[f"{layer.name}/{key}"])


def shard_of(parameter: Any, value: Tensor) -> Tensor:
    """This rank's part under ZeRO-3 of a ``value`` of the whole parameter's shape, flat and padded with zeros.

    DeepSpeed 0.19.8 cuts it without padding (runtime/zero/stage3.py, ``set_full_hp_param``) and fails where the
    ranks do not divide the size.
    """
    size, group = parameter.ds_tensor.numel(), parameter.ds_process_group
    padding = size * dist.get_world_size(group) - value.numel()
    return nn.functional.pad(value.flatten(), (0, padding)).split(size)[dist.get_rank(group)]


def refuse_scalars(layers: Sequence[Layer]) -> None:
    """Refuse a parameter without dimensions, by name: DeepSpeed 0.19.8 crashes on one in ``initialize``."""
    for layer in layers:
        for key, parameter in layer.module.named_parameters():
            if parameter.dim() == 0:
                raise UserError(
                    f"layer '{layer.name}': parameter {key} has no dimension, which DeepSpeed cannot train; give it "
                    "the shape (1,)"
                )


def grad_norm(engine: Any, scale: float) -> float | None:
    """The norm of the last step's gradient; ``scale`` is what ``missing_scale`` gave before the step."""
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm) / scale


def missing_scale(engine: Any) -> float:
    """The loss scale where DeepSpeed's ``backward`` forgets it.

    At stage 0 in fp16, DeepSpeed 0.19.8 divides gradients by the loss scale in ``step`` but multiplies the
    loss only for its ZeRO optimizers (runtime/engine.py, ``backward``): gradients would come out 2^16 times
    too small, below Adam's eps. ``test_fp16_takes_the_step_that_fp32_takes`` watches over this.
    """
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    optimizer = engine.optimizer
    scaling = getattr(optimizer, "loss_scale_config", None)
    if scaling is None or isinstance(optimizer, ZeROOptimizer) or not scaling.use_grad_scaling:
        return 1.0
    return float(scaling.cur_scale)


def loss_scale(engine: Any) -> float:
    """The loss scale from wherever this optimizer of DeepSpeed keeps it; 1 without one."""
    optimizer = engine.optimizer
    scaling = getattr(optimizer, "loss_scale_config", None)
    if scaling is not None:
        return float(scaling.cur_scale)
    if engine.torch_autocast_z0_gradscaler:
        return float(engine.torch_autocast_z0_gradscaler.get_scale())
    scaler = getattr(optimizer, "loss_scaler", None)
    return float(scaler.loss_scale) if scaler is not None else 1.0


def _gathered(parameter: nn.Parameter) -> Tensor:
    """The whole parameter, also where ZeRO-3 has sharded it."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


def _unsharded_masters(optimizer: Any) -> dict[int, Tensor]:
    """fp32 masters by ``id`` of their parameter, where DeepSpeed keeps them whole (16 bits at stage 0).

    ``safe_get_full_fp32_param`` does not know these: deepspeed/runtime/fp16/{un,}fused_optimizer.py of 0.19.
    """
    masters: dict[int, Tensor] = {}
    groups = getattr(optimizer, "fp16_groups", [])
    if hasattr(optimizer, "fp32_groups"):
        for group, group_masters in zip(groups, optimizer.fp32_groups, strict=True):
            masters |= {id(p): master.detach() for p, master in zip(group, group_masters, strict=True)}
    elif hasattr(optimizer, "fp32_groups_flat"):
        for group, flat in zip(groups, optimizer.fp32_groups_flat, strict=True):
            parts = flat.detach().split([parameter.numel() for parameter in group])
            masters |= {id(p): part.view(p.shape) for p, part in zip(group, parts, strict=True)}
    return masters


def _buffers(layer: Layer) -> dict[str, Tensor]:
    names = layer.module.state_dict().keys() - dict(layer.module.named_parameters()).keys()
    buffers = dict(layer.module.named_buffers())
    return {name: buffers[name] for name in sorted(names)}
