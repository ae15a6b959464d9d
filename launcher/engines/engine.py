"""What the training loop asks of an engine, and the pieces that all engines share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


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
    data_rank: int
    """Which slice of each global batch this rank reads …"""
    data_world: int
    """… out of how many. Ranks of one pipeline share a slice."""
    chunks: int
    """Micro-batches that one step is really split into."""

    def train_step(self, batches: Sequence[MicroBatch]) -> StepResult:
        """Run forward, backward and one optimizer step over the micro-batches of this rank."""

    def evaluate(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give the head's output state of ``state`` without gradient, in evaluation mode, on every rank of
        the pipeline that holds the rows."""

    def named_tensors(self) -> dict[str, Tensor]:
        """Give all weights on the CPU, keyed by layer name; empty on ranks other than 0. Collective."""

    def load_named_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load weights keyed by layer name into this rank's part, master copies included. Collective."""

    def close(self) -> None:
        """End worker threads and process groups; safe to call twice."""


def mean_over_ranks(
    values: dict[str, Tensor], group: "torch.distributed.ProcessGroup | None"
) -> dict[str, float]:
    """Average scalars over ranks with one collective."""
    names = sorted(values)
    packed = torch.stack([values[name].detach().float().reshape(()) for name in names])
    if group is not None and torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(packed, group=group)
        packed /= torch.distributed.get_world_size(group)
    return dict(zip(names, packed.tolist(), strict=True))
