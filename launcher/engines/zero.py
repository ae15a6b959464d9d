"""ZeRO engine: the layers as one ``nn.Sequential`` under DeepSpeed, data parallel, stages 0 to 3."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.config.training import TrainingConfig
from launcher.distributed import Distributed
from launcher.engines.engine import MicroBatch, StepLosses, StepResult
from models.layer import Layer, set_autocast
from models.losses import Objectives


class ZeroEngine:
    """Trains the layers with ``deepspeed.initialize``; see ``launcher.engines.engine.Engine``."""

    name = "zero"
    chunks = 1

    def __init__(
        self,
        layers: Sequence[Layer],
        config: TrainingConfig,
        objectives: Objectives,
        distributed: Distributed,
        device: torch.device,
    ) -> None:
        import deepspeed

        self.layers = list(layers)
        self.config = config
        self.objectives = objectives
        self.data_rank, self.data_world = distributed.rank, distributed.world_size
        if config.autocast_dtype:
            set_autocast(self.layers, getattr(torch, config.autocast_dtype))
        for layer in self.layers:
            layer.reentrant = config.zero_stage == 3
        network = nn.Sequential(*self.layers).to(device)
        self.deepspeed: Any = deepspeed.initialize(
            model=network,
            model_parameters=[parameter for parameter in network.parameters() if parameter.requires_grad],
            config=config.deepspeed,
        )[0]

    def train_step(self, batches: Sequence[MicroBatch]) -> StepResult:
        """See ``Engine.train_step``; DeepSpeed divides by the number of micro-batches and of ranks."""
        engine = self.deepspeed
        engine.train()
        lr, scale = engine.get_lr()[0], self._missing_scale()
        losses = StepLosses(self.objectives, engine.device)
        for batch in batches:
            found = self.objectives(engine(batch.state), batch.targets)
            engine.backward(found.total * batch.weight * self._missing_scale())
            engine.step()
            losses.add(found, batch.weight)
        return losses.result(
            lr=lr,
            grad_norm=self._grad_norm(scale),
            loss_scale=_loss_scale(engine),
            overflow=bool(getattr(engine.optimizer, "overflow", False)),
        )

    def _missing_scale(self) -> float:
        """The loss scale where DeepSpeed's ``backward`` forgets it.

        At stage 0 in fp16, DeepSpeed 0.19.8 divides gradients by the loss scale in ``step`` but multiplies the
        loss only for its ZeRO optimizers (runtime/engine.py, ``backward``): gradients would come out 2^16 times
        too small, below Adam's eps. ``test_fp16_takes_the_step_that_fp32_takes`` watches over this.
        """
        from deepspeed.runtime.base_optimizer import ZeROOptimizer

        optimizer = self.deepspeed.optimizer
        scaling = getattr(optimizer, "loss_scale_config", None)
        if scaling is None or isinstance(optimizer, ZeROOptimizer) or not scaling.use_grad_scaling:
            return 1.0
        return float(scaling.cur_scale)

    def _grad_norm(self, scale: float) -> float | None:
        norm = self.deepspeed.get_global_grad_norm()
        return None if norm is None else float(norm) / scale

    @torch.no_grad()
    def evaluate(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See ``Engine.evaluate``."""
        self.deepspeed.eval()
        return self.deepspeed(state)

    def named_tensors(self) -> dict[str, Tensor]:
        """See ``Engine.named_tensors``; weights are the fp32 masters."""
        from deepspeed.utils import safe_get_full_fp32_param

        found: dict[str, Tensor] = {}
        keep = dist.get_rank() == 0
        masters = _unsharded_masters(self.deepspeed.optimizer)
        for layer in self.layers:
            for key, parameter in layer.module.named_parameters():
                full = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
                if full is None:
                    full = masters.get(id(parameter))
                if full is None:
                    full = _gathered(parameter)
                if keep:
                    found[f"{layer.name}/{key}"] = full.detach().float().cpu().clone()
            if keep:
                found |= {
                    f"{layer.name}/{key}": value.cpu().clone() for key, value in _buffers(layer).items()
                }
        return found

    @torch.no_grad()
    def load_named_tensors(self, tensors: dict[str, Tensor]) -> None:
        """See ``Engine.load_named_tensors``."""
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters
        from deepspeed.utils import safe_set_full_fp32_param

        masters = _unsharded_masters(self.deepspeed.optimizer)
        for layer in self.layers:
            for key, parameter in layer.module.named_parameters():
                value = tensors[f"{layer.name}/{key}"].to(parameter.device)
                with GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")):
                    parameter.data.copy_(value)
                sharded = hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")
                if parameter.requires_grad and sharded:
                    safe_set_full_fp32_param(parameter, value.float())
                if id(parameter) in masters:
                    masters[id(parameter)].copy_(value)
            for key, buffer in _buffers(layer).items():
                buffer.copy_(tensors[f"{layer.name}/{key}"])

    def close(self) -> None:
        """Free DeepSpeed's hooks."""
        self.deepspeed.destroy()


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


def _loss_scale(engine: Any) -> float:
    """The loss scale from wherever this optimizer of DeepSpeed keeps it; 1 without one."""
    optimizer = engine.optimizer
    scaling = getattr(optimizer, "loss_scale_config", None)
    if scaling is not None:
        return float(scaling.cur_scale)
    if engine.torch_autocast_z0_gradscaler:
        return float(engine.torch_autocast_z0_gradscaler.get_scale())
    scaler = getattr(optimizer, "loss_scaler", None)
    return float(scaler.loss_scale) if scaler is not None else 1.0
