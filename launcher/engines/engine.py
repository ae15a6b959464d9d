"""What the training loop asks of an engine, and the pieces that all engines share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.engines.update_state import UpdateState
from models.layer import Layer
from models.losses import LossTerms, Objectives


class MicroBatch(NamedTuple):
    """One micro-batch on its way into an engine: the input state and the targets of the losses."""

    state: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    weight: float = 1.0
    """Factor on the loss: this micro-batch's share of the step's rows, times the step's micro-batches over all
    ranks. 1 where all have equally many rows; otherwise it makes averaging over them a mean over rows."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, averaged over micro-batches and ranks."""

    loss: float
    losses: dict[str, float]
    """Unweighted terms: ``itc``, ``itm``, ``mlm``."""
    skipped_rows: dict[str, int]
    """Rows for which an objective had no negative."""
    lr: float
    grad_norm: float | None
    """Norm before clipping; None where the engine does not tell."""
    loss_scale: float
    overflow: bool
    """The step was skipped because gradients were not finite; the schedule did not advance."""


class Engine(Protocol):
    """One way of training the layers; every rank of a run holds one."""

    name: str
    layers: list[Layer]
    """Those that this rank holds."""
    data_rank: int
    """Which slice of each global batch this rank reads …"""
    data_world: int
    """… out of how many. Ranks of one pipeline share a slice."""
    stage: int | None
    """The one stage that this rank holds; None where it holds all layers."""
    chunks: int
    """Micro-batches that really follow each other through the stages before those run empty."""

    def train_step(self, batches: Sequence[MicroBatch]) -> StepResult:
        """Run forward, backward and one optimizer step over the micro-batches of this rank."""

    def evaluate(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give the head's output state of ``state`` without gradient, in evaluation mode, on every rank of
        the pipeline that holds the rows."""

    def named_tensors(self) -> dict[str, Tensor]:
        """Give all weights on the CPU, keyed by layer name; empty on ranks other than 0. Collective."""

    def load_named_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load weights keyed by layer name into this rank's part, master copies included. Collective."""

    def update_state(self) -> UpdateState:
        """Give the optimizer, schedule and loss scale behind this rank's part of the weights."""

    def close(self) -> None:
        """End worker threads and process groups; safe to call twice."""


class StepLosses:
    """Sums a step's losses over micro-batches, then over all ranks, up to one StepResult.

    Ranks that compute no loss (the first stages of a pipeline) add nothing, and learn the result as well.
    """

    def __init__(self, objectives: Objectives, device: torch.device) -> None:
        self.names, self.skippable = objectives.names, objectives.skippable
        # total, one for each objective, rows skipped by each that can, micro-batches
        self._sums = torch.zeros(2 + len(self.names) + len(self.skippable), device=device)

    def add(self, losses: LossTerms, weight: float) -> None:
        """Count one micro-batch; ``weight`` is its own (see ``MicroBatch``)."""
        weighted = [losses.total.detach(), *(losses.terms[name] for name in self.names)]
        counts = [*(losses.skipped[name] for name in self.skippable), torch.ones_like(losses.total)]
        found = [value.float() * weight for value in weighted] + [value.float() for value in counts]
        self._sums += torch.stack(found).to(self._sums.device)

    def result(self, *, lr: float, grad_norm: float | None, loss_scale: float, overflow: bool) -> StepResult:
        """Give the step's result, the same on all ranks. One collective."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._sums)
        total, *values, batches = self._sums.tolist()
        terms, skipped = values[: len(self.names)], values[len(self.names) :]
        return StepResult(
            loss=total / batches,
            losses={name: value / batches for name, value in zip(self.names, terms, strict=True)},
            skipped_rows={name: round(rows) for name, rows in zip(self.skippable, skipped, strict=True)},
            lr=lr,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            overflow=overflow,
        )
