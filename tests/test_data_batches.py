"""Batching by memory: within the budget, complete, alike on all ranks, and right gradients."""

import numpy as np
import pytest
import torch

from launcher.data.cost import ActivationCost, TransformerShape, budget_bytes
from launcher.data.memory_batches import MemoryBatches
from launcher.data.order import DataPosition
from models.errors import DataError, DoesNotFit, UserError

LENGTHS = np.clip(np.random.default_rng(0).lognormal(2.6, 0.5, 997).astype(np.int64), 4, 64)


def cost(rows: int, tokens: int) -> int:
    return rows * (1000 + 100 * tokens + tokens * tokens)


def plan(budget: int = 200_000, per_step: int = 4, **options: int) -> MemoryBatches:
    return MemoryBatches(LENGTHS, batches_per_step=per_step, budget_bytes=budget, cost=cost, **options)


def epoch_steps(batches: MemoryBatches, epoch: int = 0, world_size: int = 1) -> list[list[list]]:
    """Every step of an epoch: for every rank its micro-batches."""
    position, steps = DataPosition(seed=9, epoch=epoch), []
    while position.epoch == epoch:
        steps.append([batches.step(position, rank, world_size) for rank in range(world_size)])
        position = batches.after(position)
    assert position.position == 0
    return steps


@pytest.mark.parametrize("per_step", [1, 3, 8])
@pytest.mark.parametrize("multiple", [1, 4])
def test_an_epoch_is_complete_and_every_batch_is_within_the_budget(per_step: int, multiple: int) -> None:
    batches = plan(per_step=per_step, rows_multiple=multiple)
    seen, odd = [], 0
    for step in epoch_steps(batches):
        assert len(step[0]) == per_step
        for batch in step[0]:
            assert LENGTHS[batch.sample_ids].max() == batch.length
            assert cost(len(batch.sample_ids), batch.length) <= 200_000
            odd += len(batch.sample_ids) % multiple != 0
            seen += batch.sample_ids.tolist()
    assert sorted(seen) == list(range(len(LENGTHS)))
    assert odd <= 1


def test_batches_start_at_multiples_and_rows_are_never_used_twice() -> None:
    rows = []
    for epoch in range(3):
        for step in epoch_steps(plan(rows_multiple=4), epoch):
            for batch in step[0]:
                assert batch.rows[0] % 4 == 0
                rows += batch.rows.tolist()
    assert len(set(rows)) == len(rows) == 3 * len(LENGTHS)


def test_the_costliest_batches_come_first() -> None:
    steps = epoch_steps(plan())
    costs = [[cost(len(batch.sample_ids), batch.length) for batch in step[0]] for step in steps]
    assert max(costs[0]) == max(map(max, costs))
    assert min(costs[0]) >= sorted(value for step in costs for value in step)[-4]


def test_ranks_share_a_step_and_world_sizes_agree() -> None:
    batches = plan(per_step=4)
    one, two, four = (epoch_steps(batches, world_size=world_size) for world_size in (1, 2, 4))
    for alone, pair, quartet in zip(one, two, four, strict=True):
        samples = [batch.sample_ids.tolist() for batch in alone[0]]
        assert [batch.sample_ids.tolist() for rank in pair for batch in rank] == samples
        assert [batch.sample_ids.tolist() for rank in quartet for batch in rank] == samples
        assert {len(rank) for rank in pair} == {2}


def test_fewer_batches_than_fixed_padding_needs() -> None:
    budget = cost(16, 64)
    rows = [len(batch.sample_ids) for step in epoch_steps(plan(budget)) for batch in step[0]]
    assert len(rows) * 2 < len(LENGTHS) / 16


def test_epochs_mix_samples_differently() -> None:
    first, second = (
        {tuple(sorted(batch.sample_ids.tolist())) for step in epoch_steps(plan(), epoch) for batch in step[0]}
        for epoch in (0, 1)
    )
    assert len(first & second) < len(first) / 4


def test_resuming_in_mid_epoch_gives_the_rest() -> None:
    whole = [batch.sample_ids.tolist() for step in epoch_steps(plan()) for batch in step[0]]
    position = DataPosition(seed=9)
    for _ in range(3):
        position = plan().after(position)
    fresh, rest = plan(), []
    while position.epoch == 0:
        rest += [batch.sample_ids.tolist() for batch in fresh.step(position)]
        position = fresh.after(position)
    assert whole[12:] == rest


def test_resuming_with_another_budget_is_refused() -> None:
    position = plan().after(DataPosition(seed=9))
    with pytest.raises(DataError, match="no start of a step"):
        plan(budget=150_000).step(position)


def test_a_row_beyond_the_budget_does_not_fit() -> None:
    with pytest.raises(DoesNotFit, match="1 rows of 62 tokens need 11044 bytes"):
        plan(budget=5_000).step(DataPosition())


def test_too_few_samples_for_a_step_are_refused() -> None:
    few = MemoryBatches(np.array([5, 6, 7]), batches_per_step=4, budget_bytes=10**6, cost=cost)
    with pytest.raises(UserError, match="3 samples do not fill steps of 4 micro-batches"):
        few.step(DataPosition())


def test_captions_are_cut_to_max_length() -> None:
    batches = plan(max_length=16)
    assert max(batch.length for step in epoch_steps(batches) for batch in step[0]) == 16


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_weighted_gradients_equal_those_of_the_whole_batch(world_size: int) -> None:
    torch.manual_seed(0)
    features = torch.randn(len(LENGTHS), 6, dtype=torch.float64)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def row_losses(samples: np.ndarray) -> torch.Tensor:
        return (features[torch.from_numpy(samples)] @ weight).square()

    step = epoch_steps(plan(), world_size=world_size)[1]
    ranks = []
    for rank in step:
        weight.grad = None
        for batch in rank:
            (row_losses(batch.sample_ids) * torch.from_numpy(batch.weights).double()).sum().backward()
        ranks.append(weight.grad * world_size)
    averaged = torch.stack(ranks).mean(dim=0)  # what DDP does
    weight.grad = None
    everything = np.concatenate([batch.sample_ids for rank in step for batch in rank])
    row_losses(everything).mean().backward()
    torch.testing.assert_close(averaged, weight.grad, rtol=1e-6, atol=1e-9)  # weights are float32


def test_formula_is_korthikantis() -> None:
    # sbh(34 + 5as/h) for s=8, b=1, h=16, a=2, three layers
    assert TransformerShape(3, 16, 2).bytes_per_row(8) == 3 * 8 * 16 * (34 + 5 * 2 * 8 / 16)


def test_auto_budget_is_what_fixed_batches_take() -> None:
    towers = ActivationCost(
        TransformerShape(2, 64, 4), 65, TransformerShape(2, 64, 4), TransformerShape(1, 64, 4)
    )
    budget = budget_bytes("auto", towers, 8, 64)
    batches = MemoryBatches(LENGTHS, batches_per_step=2, budget_bytes=budget, cost=towers)
    assert batches._rows_within(64) == 8
    assert batches._rows_within(8) > 8


def test_cost_of_a_spec_has_its_shapes() -> None:
    from models.spec import load_spec

    towers = ActivationCost.of(load_spec("bert_vit_base"))
    assert towers == ActivationCost(
        TransformerShape(12, 768, 12),
        197,
        TransformerShape(12, 768, 12),
        TransformerShape(6, 768, 12),
        pairs=2,
    )


@pytest.mark.parametrize(
    ("text", "expected"), [("2GiB", 2**31), ("800M", 800 * 2**20), ("1.5g", 3 * 2**29), ("4096", 4096)]
)
def test_sizes_are_read_with_their_units(text: str, expected: int) -> None:
    assert budget_bytes(text, cost, 8, 64) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1", "0", "2 GiB of it"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="give bytes, a size such as 2GiB, or auto"):
        budget_bytes(text, cost, 8, 64)
