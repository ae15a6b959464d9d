"""Micro-batches by memory: like lengths together, as many rows as the budget holds.

fixed:    8 rows × 64 tokens, padded        ■■■□□□□□ ■■□□□□□□ ■■■■■■□□ …
budget:   rows × longest ≤ budget           ■■■■■■□□ │ ■■■ ■■■ ■■□ │ ■■ ■■ ■■ ■■ │ …
"""

import heapq
from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from launcher.data.batches import Cost, MicroBatch, batches_of_rank
from launcher.data.order import DataPosition, epoch_order
from models.errors import DataError, DoesNotFit, UserError


@dataclass(frozen=True)
class _EpochPlan:
    samples: np.ndarray
    """int64 [N], in the order of the plan."""
    ends: np.ndarray
    """int64 [batches + 1]: batch b has samples ends[b] … ends[b + 1]."""
    batch_lengths: np.ndarray
    step_ends: np.ndarray
    """int64 [steps + 1]."""


@dataclass(frozen=True, eq=False)
class MemoryBatches:
    """Steps of ``batches_per_step`` micro-batches that each cost at most ``budget_bytes``.

    An epoch's samples are sorted by length, longest first, samples of one length in the epoch's random
    order, and cut wherever one more group of rows would exceed the budget. Batches are then split, the one
    with most rows first, until they fill whole steps; so an epoch is whole steps and has each sample once.
    The costliest batches form the first step, so that what does not fit fails at once; all others follow
    in random order: as each costs about the budget, ranks wait little for each other.
    """

    lengths: np.ndarray
    """int [N]: tokens of each sample (``store.lengths``)."""
    batches_per_step: int
    budget_bytes: int
    cost: Cost
    """Bytes of a micro-batch of (rows, tokens); must grow with both."""
    max_length: int | None = None
    """Longer captions are cut."""
    rows_multiple: int = 1
    """Rows of a micro-batch are a multiple of this (ITM groups), but for an epoch's last few."""

    def step(self, position: DataPosition, rank: int = 0, world_size: int = 1) -> list[MicroBatch]:
        """Give this rank's micro-batches of the step at ``position``. Raises DataError between steps."""
        epoch = self._epoch(position)
        number = self._step_number(epoch, position)
        first_row = position.epoch * -(-len(self.lengths) // self.rows_multiple) * self.rows_multiple
        start, end = epoch.step_ends[number], epoch.step_ends[number + 1]
        batches = []
        for place in batches_of_rank(self.batches_per_step, rank, world_size):
            batch = number * self.batches_per_step + place
            rows = np.arange(epoch.ends[batch], epoch.ends[batch + 1], dtype=np.int64)
            weights = np.full(len(rows), 1 / (end - start), dtype=np.float32)
            batches.append(
                MicroBatch(epoch.samples[rows], first_row + rows, weights, int(epoch.batch_lengths[batch]))
            )
        return batches

    def after(self, position: DataPosition) -> DataPosition:
        """Give the position after the step at ``position``."""
        epoch = self._epoch(position)
        number = self._step_number(epoch, position)
        rows = int(epoch.step_ends[number + 1] - epoch.step_ends[number])
        return position.advance(rows, len(self.lengths))

    def steps_in_epoch(self, seed: int, epoch: int) -> int:
        """Give the number of steps of an epoch."""
        return len(self._epoch(DataPosition(seed, epoch)).step_ends) - 1

    def _epoch(self, position: DataPosition) -> _EpochPlan:
        key = (position.seed, position.epoch)
        if key not in self._planned:
            # Two epochs, 8 bytes per sample each: workers already fetch the next while this one is consumed.
            for old in list(self._planned)[:-1]:
                del self._planned[old]
            self._planned[key] = self._plan(*key)
        return self._planned[key]

    _planned: dict[tuple[int, int], _EpochPlan] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @staticmethod
    def _step_number(epoch: _EpochPlan, position: DataPosition) -> int:
        number = int(np.searchsorted(epoch.step_ends, position.position))
        if epoch.step_ends[number] != position.position:
            raise DataError(
                f"epoch {position.epoch}, sample {position.position} is no start of a step under this "
                "--batch-memory; resume with the same budget, accumulation × world size and data"
            )
        return number

    def _plan(self, seed: int, epoch: int) -> _EpochPlan:
        count = len(self.lengths)
        lengths = np.minimum(self.lengths, self.max_length or self.lengths.max())
        samples = epoch_order(count, seed, epoch)[np.arange(count)]
        samples = samples[np.argsort(-lengths[samples], kind="stable")]
        lengths = lengths[samples]
        sizes = self._fill_steps(self._cut(lengths))
        starts = np.cumsum(sizes) - sizes
        longest = lengths[starts]
        costs = np.array(
            [self.cost(int(rows), int(length)) for rows, length in zip(sizes, longest, strict=True)]
        )
        first = np.argsort(-costs, kind="stable")[: self.batches_per_step]
        others = np.delete(np.arange(len(sizes)), first)
        if len(others):
            others = others[epoch_order(len(others), seed, epoch)[np.arange(len(others))]]
        order = np.concatenate([first, others])
        # What is no multiple comes last, so that all others start at a multiple: ITM groups by row.
        order = order[np.argsort(sizes[order] % self.rows_multiple != 0, kind="stable")]
        chunks = [samples[starts[batch] : starts[batch] + sizes[batch]] for batch in order]
        ends = np.concatenate([[0], np.cumsum(sizes[order])])
        return _EpochPlan(np.concatenate(chunks), ends, longest[order], ends[:: self.batches_per_step])

    def _cut(self, lengths: np.ndarray) -> list[int]:
        """Cut samples, longest first, into batches within the budget; gives the rows of each."""
        rows_at: dict[int, int] = {}
        sizes = []
        start = 0
        while start < len(lengths):
            length = int(lengths[start])
            if length not in rows_at:
                rows_at[length] = self._rows_within(length)
            rows = min(rows_at[length], len(lengths) - start)
            sizes.append(rows)
            start += rows
        return sizes

    def _rows_within(self, length: int) -> int:
        """Find the most rows of this length within the budget, by bisection. Raises DoesNotFit."""
        unit = self.rows_multiple
        if self.cost(unit, length) > self.budget_bytes:
            raise DoesNotFit(
                f"--batch-memory {self.budget_bytes}: {unit} rows of {length} tokens need "
                f"{self.cost(unit, length)} bytes; give more memory or shorter captions"
            )
        units = range(1, max(1, len(self.lengths) // unit) + 1)
        return unit * bisect_right(
            units, self.budget_bytes, key=lambda number: self.cost(number * unit, length)
        )

    def _fill_steps(self, sizes: list[int]) -> np.ndarray:
        """Split batches until their number is a multiple of ``batches_per_step``. Raises UserError."""
        missing = -len(sizes) % self.batches_per_step
        heap: list[tuple[int, int, tuple[int, ...]]] = [
            (-int(rows), number, (int(rows),)) for number, rows in enumerate(sizes)
        ]
        heapq.heapify(heap)
        for _ in range(missing):
            _, number, parts = heapq.heappop(heap)
            rows = max(parts)
            half = rows // 2 // self.rows_multiple * self.rows_multiple or rows // 2
            if not half:
                raise UserError(
                    f"{len(self.lengths)} samples do not fill steps of "
                    f"{self.batches_per_step} micro-batches; "
                    "lower gradient_accumulation_steps or use fewer ranks"
                )
            rest = list(parts)
            rest.remove(rows)
            parts = (*rest, rows - half, half)
            heapq.heappush(heap, (-max(parts), number, parts))
        whole = sorted((number, parts) for _, number, parts in heap)
        return np.array([rows for _, parts in whole for rows in parts])
