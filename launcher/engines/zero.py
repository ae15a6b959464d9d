"""ZeRO engine: the layers as one ``nn.Sequential`` under DeepSpeed, data parallel, stages 0 to 3."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from launcher.config.training import TrainingConfig
from launcher.distributed import Distributed
from launcher.engines.deepspeed_state import (
    grad_norm,
    loss_scale,
    missing_scale,
    read_tensors,
    refuse_scalars,
    write_tensors,
)
from launcher.engines.engine import MicroBatch, StepLosses, StepResult
from launcher.engines.finite import poisoned, skip_what_is_not_finite
from launcher.engines.update_state import UpdateState, deepspeed_update_state
from models.layer import Layer, set_autocast
from models.losses import Objectives


class ZeroEngine:
    """Trains the layers with ``deepspeed.initialize``; see ``launcher.engines.engine.Engine``."""

    name = "zero"
    stage: int | None = None
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

        refuse_scalars(layers)
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
        skip_what_is_not_finite(self.deepspeed)

    def train_step(self, batches: Sequence[MicroBatch]) -> StepResult:
        """See ``Engine.train_step``; DeepSpeed divides by the number of micro-batches and of ranks."""
        engine = self.deepspeed
        engine.train()
        lr, scale = engine.get_lr()[0], missing_scale(engine)
        losses = StepLosses(self.objectives, engine.device)
        for batch in batches:
            found = self.objectives(engine(batch.state), batch.targets)
            engine.backward(poisoned(found.total) * batch.weight * missing_scale(engine))
            engine.step()
            losses.add(found, batch.weight)
        return losses.result(
            lr=lr,
            grad_norm=grad_norm(engine, scale),
            loss_scale=loss_scale(engine),
            overflow=bool(getattr(engine.optimizer, "overflow", False)),
        )

    @torch.no_grad()
    def evaluate(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See ``Engine.evaluate``."""
        self.deepspeed.eval()
        return self.deepspeed(state)

    def named_tensors(self) -> dict[str, Tensor]:
        """See ``Engine.named_tensors``; weights are the fp32 masters."""
        return read_tensors(self.deepspeed, self.layers, keep=self.data_rank == 0)

    def load_named_tensors(self, tensors: dict[str, Tensor]) -> None:
        """See ``Engine.load_named_tensors``."""
        write_tensors(self.deepspeed, self.layers, tensors)

    def update_state(self) -> UpdateState:
        """See ``Engine.update_state``."""
        return deepspeed_update_state(self.deepspeed, self.layers, self.data_rank)

    def close(self) -> None:
        """Free DeepSpeed's hooks."""
        self.deepspeed.destroy()
