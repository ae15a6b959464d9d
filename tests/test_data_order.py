"""The order is a pure function of (seed, epoch, position)."""

import json
import subprocess
import sys

import numpy as np
import pytest

from launcher.data.batches import FixedBatches, batches_of_rank
from launcher.data.order import DataPosition, epoch_order, samples_of_rows
from models.errors import DataError, UserError


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
@pytest.mark.parametrize("seed", [0, 1, -5, 2**40])
def test_every_epoch_has_each_sample_once(count: int, seed: int) -> None:
    for epoch in range(3):
        order = epoch_order(count, seed, epoch)[np.arange(count)]
        assert sorted(order.tolist()) == list(range(count))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_order(500, seed, epoch)[np.arange(500)]) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_places_are_computed_one_by_one_as_well() -> None:
    order = epoch_order(1000, 3, 2)
    assert [int(order[place][0]) for place in range(1000)] == order[np.arange(1000)].tolist()


def test_order_looks_random() -> None:
    count, epochs = 200, 400
    where = np.zeros((count, 4))
    neighbours = 0
    for epoch in range(epochs):
        order = epoch_order(count, 11, epoch)[np.arange(count)]
        where[order, np.arange(count) * 4 // count] += 1
        neighbours += int((np.diff(order) == 1).sum())
    expected = epochs / 4
    chi_squared = ((where - expected) ** 2 / expected).sum(axis=1)  # 3 degrees of freedom: mean 3
    assert 2.3 < chi_squared.mean() < 3.7
    assert 0.7 < neighbours / (epochs * (count - 1) / count) < 1.3


def test_order_never_changes_between_versions() -> None:
    # A resumed run of a newer vlfit must go on in the same order: these are the numbers of the first one.
    assert epoch_order(10, 0, 0)[np.arange(10)].tolist() == [1, 0, 7, 2, 8, 3, 4, 5, 6, 9]


def test_order_is_the_same_in_another_process() -> None:
    program = "from launcher.data.order import *; print(epoch_order(99, 7, 5)[np.arange(99)].tolist())"
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert json.loads(there) == epoch_order(99, 7, 5)[np.arange(99)].tolist()


def test_batches_span_epochs_so_that_each_is_complete() -> None:
    plan = FixedBatches(count=10, micro_batch=2, batches_per_step=2)
    position, seen = DataPosition(seed=5), []
    for _ in range(5):  # 20 rows: two epochs
        for batch in plan.step(position):
            seen += batch.sample_ids.tolist()
        position = plan.after(position)
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert position == DataPosition(seed=5, epoch=2, position=0)


@pytest.mark.parametrize("worlds", [(1, 2), (2, 4), (4, 1)])
def test_a_step_has_the_same_samples_for_any_world_size(worlds: tuple[int, int]) -> None:
    plan = FixedBatches(count=37, micro_batch=3, batches_per_step=4)
    position = DataPosition(seed=1, epoch=0, position=29)
    steps = []
    for world_size in worlds:
        ranks = [plan.step(position, rank, world_size) for rank in range(world_size)]
        steps.append([batch.sample_ids.tolist() for batches in ranks for batch in batches])
    assert steps[0] == steps[1]


def test_rows_are_unique_across_epochs() -> None:
    plan = FixedBatches(count=7, micro_batch=4, batches_per_step=2)
    position, rows = DataPosition(), []
    for _ in range(6):
        rows += [row for batch in plan.step(position) for row in batch.rows.tolist()]
        position = plan.after(position)
    assert rows == list(range(48))
    assert position.row(7) == 48


def test_a_store_smaller_than_a_batch_repeats_whole_epochs() -> None:
    samples = samples_of_rows(0, 12, 3, 0)
    assert all(sorted(samples[start : start + 3].tolist()) == [0, 1, 2] for start in range(0, 12, 3))


def test_position_survives_json() -> None:
    position = DataPosition(seed=4, epoch=2, position=17)
    assert DataPosition.from_json(position.to_json()) == position
    with pytest.raises(DataError, match="resume from another checkpoint"):
        DataPosition.from_json('{"seed": 1}')


def test_micro_batches_that_do_not_divide_over_ranks_are_refused() -> None:
    with pytest.raises(UserError, match="do not divide over 3 ranks"):
        batches_of_rank(4, 0, 3)
