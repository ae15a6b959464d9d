"""Which samples form which micro-batch: plans that every rank computes alike.

A plan cuts an epoch into *steps* of P micro-batches (P = accumulation × world size); rank r of W takes the
r-th P/W of them, one after the other. So the samples of a step do not depend on the world size, and all
ranks have the same number of micro-batches.

    step:      b0 b1 b2 b3 b4 b5 b6 b7        P = 8
    W = 2:     rank 0 ──────│ rank 1 ─────    accumulation 4
    W = 4:     r0 ──│ r1 ──│ r2 ──│ r3 ──     accumulation 2
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from launcher.data.order import DataPosition, samples_of_rows
from models.errors import UserError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples that one rank pushes through the model at once."""

    sample_ids: np.ndarray
    """int64 [B]."""
    rows: np.ndarray
    """int64 [B]: neighbouring numbers, each used once in a run: keys for per-sample randomness."""
    weights: np.ndarray
    """float32 [B]: they sum to 1 over the whole step, all ranks included. A step's loss is the sum of
    weight × row loss; where ranks are averaged (DDP, ZeRO), multiply by the world size."""
    length: int | None
    """Tokens to pad to; None: the longest caption of the batch."""


Cost = Callable[[int, int], int]
"""(rows, tokens per row) → bytes of a micro-batch."""


class Plan(Protocol):
    """A pure function from a position to the micro-batches of the step that starts there."""

    def step(self, position: DataPosition, rank: int, world_size: int) -> list[MicroBatch]: ...

    def after(self, position: DataPosition) -> DataPosition: ...


@dataclass(frozen=True)
class FixedBatches:
    """Steps of ``micro_batch`` × ``batches_per_step`` rows, cut from the endless stream of epochs."""

    count: int
    """Samples in the store."""
    micro_batch: int
    batches_per_step: int
    length: int | None = None

    @property
    def rows_per_step(self) -> int:
        """The global batch size."""
        return self.micro_batch * self.batches_per_step

    def step(self, position: DataPosition, rank: int = 0, world_size: int = 1) -> list[MicroBatch]:
        """Give this rank's micro-batches of the step at ``position``."""
        first = position.row(self.count)
        batches = []
        for number in batches_of_rank(self.batches_per_step, rank, world_size):
            rows = first + number * self.micro_batch + np.arange(self.micro_batch, dtype=np.int64)
            weights = np.full(len(rows), 1 / self.rows_per_step, dtype=np.float32)
            batches.append(
                MicroBatch(
                    samples_of_rows(int(rows[0]), len(rows), self.count, position.seed),
                    rows,
                    weights,
                    self.length,
                )
            )
        return batches

    def after(self, position: DataPosition) -> DataPosition:
        """Give the position after the step at ``position``."""
        return position.advance(self.rows_per_step, self.count)


def batches_of_rank(batches_per_step: int, rank: int, world_size: int) -> range:
    """Give the numbers of a rank's micro-batches in a step. Raises UserError if they do not divide."""
    share, rest = divmod(batches_per_step, world_size)
    if rest:
        raise UserError(
            f"{batches_per_step} micro-batches per step do not divide over {world_size} ranks; "
            "change gradient_accumulation_steps or the number of ranks"
        )
    return range(rank * share, (rank + 1) * share)
