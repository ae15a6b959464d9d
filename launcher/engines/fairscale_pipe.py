"""FairScale engine: ``Pipe`` inside one process, data parallel over processes, from the same DeepSpeed JSON.

Every process drives all stages of its own copy of the model. Precision is autocast inside the layers (Pipe's
worker threads do not see an outer one), with fp32 parameters; fp16 adds a gradient scaler. The losses see
the whole mini-batch, however many chunks it was split into.
"""

import contextlib
import gc
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from launcher.config.training import TrainingConfig
from launcher.distributed import Distributed
from launcher.engines.engine import MicroBatch, StepLosses, StepResult
from launcher.engines.finite import poisoned
from launcher.engines.update_state import Fragment, UpdateState
from models.errors import UserError
from models.layer import Layer, named_tensors, set_autocast
from models.losses import Objectives
from models.partition import PartitionSpec

_AUTOCAST = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "autocast-bf16": torch.bfloat16,
    "fp16": torch.float16,
    "autocast-fp16": torch.float16,
}


class FairScalePipeEngine:
    """Trains the layers in a FairScale ``Pipe``; see ``launcher.engines.engine.Engine``."""

    name = "fairscale"
    stage: int | None = None

    def __init__(
        self,
        layers: Sequence[Layer],
        partition: PartitionSpec,
        config: TrainingConfig,
        objectives: Objectives,
        distributed: Distributed,
        total_steps: int,
        devices: Sequence[torch.device],
    ) -> None:
        if config.optimizer.torch_name is None:
            raise UserError(
                f"{config.path}: optimizer.type {config.optimizer.name} is DeepSpeed's own; the FairScale engine "
                "needs one that torch.optim has, such as AdamW"
            )
        self.layers = list(layers)
        self.config, self.objectives = config, objectives
        self.data_rank, self.data_world = distributed.rank, distributed.world_size
        self.devices = [devices[index] for index in partition.devices]
        dtype = _AUTOCAST[config.precision_used]
        set_autocast(self.layers, dtype)
        self.pipe: Any = partition.to_pipe(self.layers, self.devices)
        # FairScale moves each stage; it cannot report how many micro-batches a batch really gives.
        self.chunks = len(torch.empty(config.micro_batch_size).chunk(partition.chunks))
        parallel = distributed.world_size > 1
        self.model: nn.Module = nn.parallel.DistributedDataParallel(self.pipe) if parallel else self.pipe
        trainable = [parameter for parameter in self.pipe.parameters() if parameter.requires_grad]
        self.optimizer = _optimizer(config, trainable, sharded=config.zero_stage >= 1 and parallel)
        self.scheduler = _scheduler(config, self.optimizer)
        scale = config.loss_scale if dtype is torch.float16 else None
        self.scaler = torch.amp.GradScaler(
            self.devices[0].type,
            enabled=scale is not None,
            init_scale=scale.initial if scale else 1.0,
            growth_interval=scale.window if scale else 1,
        )
        self.lowest_scale = scale.minimum if scale else 0.0

    def train_step(self, batches: Sequence[MicroBatch]) -> StepResult:
        """See ``Engine.train_step``; gradients are averaged over ranks at the last micro-batch only."""
        self.model.train()
        lr = self.optimizer.param_groups[0]["lr"]
        losses = StepLosses(self.objectives, self.devices[-1])
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with contextlib.nullcontext() if last else self._no_sync():
                outputs = self.model(self._enter(batch.state))
                targets = tuple(tensor.to(self.devices[-1]) for tensor in batch.targets)
                found = self.objectives(outputs, targets)
                self.scaler.scale(poisoned(found.total) * batch.weight / len(batches)).backward()
            losses.add(found, batch.weight)
        overflow, norm = self._update()
        return losses.result(
            lr=lr,
            grad_norm=norm,
            loss_scale=float(self.scaler.get_scale()) if self.scaler.is_enabled() else 1.0,
            overflow=overflow,
        )

    @torch.no_grad()
    def evaluate(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See ``Engine.evaluate``; the pipe itself, so that ranks need not keep in step."""
        self.pipe.eval()
        return tuple(tensor.to(state[0].device) for tensor in self.pipe(self._enter(state)))

    def _enter(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self.devices[0]) for tensor in state)

    def named_tensors(self) -> dict[str, Tensor]:
        """See ``Engine.named_tensors``."""
        if self.data_rank:
            return {}
        return {
            key: tensor.detach().float().cpu().clone() for key, tensor in named_tensors(self.layers).items()
        }

    @torch.no_grad()
    def load_named_tensors(self, tensors: dict[str, Tensor]) -> None:
        """See ``Engine.load_named_tensors``."""
        for key, tensor in named_tensors(self.layers).items():
            tensor.copy_(tensors[key])

    def update_state(self) -> UpdateState:
        """See ``Engine.update_state``; with ZeRO 1, each rank updates, and so writes, its own parameters."""
        inner = getattr(self.optimizer, "optim", self.optimizer)
        mine = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
        fragments = [
            Fragment(f"{layer.name}/{key}", 0, parameter.numel(), parameter, 0)
            for layer in self.layers
            for key, parameter in layer.module.named_parameters()
            if id(parameter) in mine
        ]
        return UpdateState(
            inner,
            self.optimizer.param_groups,
            fragments,
            writes=inner is not self.optimizer or self.data_rank == 0,
            scheduler=self.scheduler,
            scalers=[self.scaler] if self.scaler.is_enabled() else [],
        )

    def close(self) -> None:
        """End the worker threads.

        FairScale leaves that to ``Pipeline.__del__``, which at the interpreter's exit can wait for ever, and after
        an exception does not run as long as the traceback holds the pipeline. It finds no queues any more.
        """
        from fairscale.nn.pipe.worker import join_workers

        pipeline = self.pipe.pipeline
        join_workers(pipeline.in_queues, pipeline.out_queues)
        pipeline.in_queues, pipeline.out_queues = [], []
        # DistributedDataParallel holds on to the process group, which is destroyed next.
        self.model = self.pipe
        gc.collect()

    def _no_sync(self) -> contextlib.AbstractContextManager:
        return (
            self.model.no_sync()
            if isinstance(self.model, nn.parallel.DistributedDataParallel)
            else contextlib.nullcontext()
        )

    def _update(self) -> tuple[bool, float]:
        """Clip and step. Gives whether the step was skipped, and the norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        parameters = [parameter for parameter in self.pipe.parameters() if parameter.grad is not None]
        clip = self.config.gradient_clipping or float("inf")
        # After DistributedDataParallel every rank has the same gradients, so the norm is the same, too.
        norm = float(nn.utils.clip_grad_norm_(parameters, clip))
        overflow = not math.isfinite(norm)
        if not overflow:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.is_enabled() and self.scaler.get_scale() < self.lowest_scale:
            self.scaler.update(self.lowest_scale)  # torch's scaler knows no minimum
        if self.scheduler is not None and not overflow:
            self.scheduler.step()
        self.pipe.zero_grad(set_to_none=True)
        return overflow, norm


def _optimizer(
    config: TrainingConfig, parameters: list[nn.Parameter], sharded: bool
) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, str(config.optimizer.torch_name))
    if not sharded:
        return kind(parameters, **config.optimizer.torch_params)
    from fairscale.optim import OSS

    return OSS(parameters, optim=kind, **config.optimizer.torch_params)


def _scheduler(config: TrainingConfig, optimizer: torch.optim.Optimizer) -> Any:
    """DeepSpeed's own schedule on our optimizer, so that both engines see the same learning rates."""
    if config.scheduler is None:
        return None
    from deepspeed.runtime import lr_schedules

    return getattr(lr_schedules, config.scheduler.name)(optimizer, **config.scheduler.params)
