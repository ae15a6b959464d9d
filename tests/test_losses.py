"""The objectives against loops by hand, transformers, and two real ranks."""

import copy
import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from conftest import TINY
from torch.nn import functional

from models.fusion import FusionEmbed
from models.losses import IGNORED, Objectives, masked_rows, matching_rows
from models.schema import validate
from models.spec import ModelSpec


def spec_with(**objectives: dict) -> ModelSpec:
    return validate(copy.deepcopy(TINY) | {"objectives": objectives}, ModelSpec, "test")


def features(rows: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    unit = functional.normalize(torch.randn(rows, 2, 16, generator=random), dim=-1)
    return unit * torch.tensor([14.0, 1.0])[:, None]


def test_itc_equals_clips_loss_where_nothing_repeats() -> None:
    rows = features(8)
    identities = torch.arange(8)[:, None].expand(8, 2)
    found, skipped = Objectives(spec_with(itc={})).contrastive_rows(rows, identities)
    logits, labels = rows[:, 0] @ rows[:, 1].T, torch.arange(8)
    clip = (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2
    torch.testing.assert_close(found.mean(), clip)
    assert skipped == 0


def test_same_image_or_caption_is_a_positive() -> None:
    rows = features(5)
    identities = torch.tensor([[0, 0], [0, 1], [2, 2], [3, 2], [4, 4]])
    found, _ = Objectives(spec_with(itc={})).contrastive_rows(rows, identities)
    for i in range(5):
        loss = 0.0
        for query, keys in ((rows[i, 0], rows[:, 1]), (rows[i, 1], rows[:, 0])):
            scores = [float(query @ key) for key in keys]
            total = np.log(np.sum(np.exp(scores)))
            positive = [j for j in range(5) if (identities[i] == identities[j]).any()]
            loss += np.mean([total - scores[j] for j in positive]) / 2
        assert abs(float(found[i]) - loss) < 1e-4


def test_batch_of_one_is_skipped_and_counted_not_nan() -> None:
    single = features(1).requires_grad_()
    loss, skipped = Objectives(spec_with(itc={})).contrastive_rows(
        single, torch.zeros(1, 2, dtype=torch.int64)
    )
    loss.sum().backward()
    assert loss.item() == 0 and skipped == 1 and torch.equal(single.grad, torch.zeros_like(single))
    usable = torch.tensor([[True, False]])
    logits = torch.randn(1, 2, 2, requires_grad=True)
    loss, skipped = matching_rows(logits, usable)
    assert loss.item() == 0 and skipped == 1


def test_itm_is_the_mean_over_usable_pairs() -> None:
    logits = torch.randn(3, 3, 2)
    usable = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    found, skipped = matching_rows(logits, usable)
    losses = -functional.log_softmax(logits, dim=2)
    expected = [
        (losses[0, 0, 1] + losses[0, 1, 0] + losses[0, 2, 0]) / 3,
        (losses[1, 0, 1] + losses[1, 1, 0]) / 2,
        torch.tensor(0.0),
    ]
    torch.testing.assert_close(found, torch.stack(expected))
    assert skipped == 1


def test_mlm_equals_transformers_cross_entropy() -> None:
    """transformers averages over all masked tokens; with equally many in each row that is the mean of rows."""
    logits, labels = torch.randn(4, 3, 50), torch.randint(0, 50, (4, 3))
    labels[:, 2] = IGNORED
    torch.testing.assert_close(
        masked_rows(logits, labels).mean(), functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    )


def test_row_without_masked_tokens_costs_nothing() -> None:
    labels = torch.full((2, 3), IGNORED)
    assert masked_rows(torch.randn(2, 3, 50), labels).tolist() == [0, 0]


class TestNegatives:
    def embed(self, negatives: int = 1, group: int = 4) -> FusionEmbed:
        return FusionEmbed(spec_with(itc={}, itm={"negatives": negatives, "group": group}), 32, True)

    def keys(self, rows: int, group: int = 4) -> torch.Tensor:
        index = torch.arange(rows)
        return torch.stack([index, index, index // group, index % group], dim=1)

    def bits(self, rows: int, group: int = 4, seed: int = 0) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed)
        return torch.randint(0, 2**31 - 1, (rows, group), generator=random, dtype=torch.int32)

    def test_do_not_depend_on_the_split_into_micro_batches(self) -> None:
        embed, rows, bits, keys = self.embed(2), features(16), self.bits(16), self.keys(16)
        whole, _ = embed.pairs(rows, bits, keys)
        for first in range(0, 16, 4):
            part = slice(first, first + 4)
            chosen, usable = embed.pairs(rows[part], bits[part], keys[part])
            assert torch.equal(chosen + first, whole[part]) and usable.all()

    def test_come_from_the_group_and_share_no_identity(self) -> None:
        keys = self.keys(16)
        keys[1, 0], keys[2, 1] = keys[0, 0], keys[0, 1]  # the same image as row 0; the same caption
        for seed in range(50):
            chosen, usable = self.embed().pairs(features(16, seed), self.bits(16, seed=seed), keys)
            assert usable.all() and chosen[0, 1] == 3
            assert torch.equal(chosen[:, 1] // 4, torch.arange(16) // 4)

    def test_follow_the_softmax_of_the_logits(self) -> None:
        rows = features(4)
        rows[:, 0] /= 7
        expected = (rows[0, 0] @ rows[1:, 1].T).softmax(0)
        count = torch.zeros(4)
        for seed in range(4000):
            chosen, _ = self.embed().pairs(rows, self.bits(4, seed=seed), self.keys(4))
            count[chosen[0, 1]] += 1
        np.testing.assert_allclose(count[1:] / 4000, expected, atol=3 * 0.5 / 4000**0.5)

    def test_saturated_softmax_still_draws(self) -> None:
        rows = features(4)
        rows[:, 0] *= 1e4
        chosen, usable = self.embed(3).pairs(rows, self.bits(4), self.keys(4))
        assert usable.all() and chosen.sort(dim=1).values.tolist() == [[0, 1, 2, 3]] * 4

    def test_group_cut_short_has_fewer_and_says_so(self) -> None:
        chosen, usable = self.embed(3).pairs(features(6), self.bits(6), self.keys(6))
        assert usable.sum(dim=1).tolist() == [4, 4, 4, 4, 2, 2]
        chosen, usable = self.embed(3).pairs(features(1), self.bits(1), self.keys(1))
        assert chosen.shape == (1, 4) and usable.tolist() == [[True, False, False, False]]


SPLITS = {"equal": [4, 4], "unequal": [5, 3]}


@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_give_the_loss_and_gradients_of_one(split: str) -> None:
    rows = features(8).requires_grad_()
    identities = torch.tensor([[i // 2, i] for i in range(8)])
    loss, _ = Objectives(spec_with(itc={})).contrastive_rows(rows, identities)
    loss.mean().backward()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").Manager().dict()
    multiprocessing.spawn(_rank, (port, SPLITS[split], results), nprocs=2)
    gradient = torch.cat([torch.tensor(results[rank][1]) for rank in range(2)])
    torch.testing.assert_close(gradient, rows.grad)
    torch.testing.assert_close(torch.tensor(sum(results[rank][0] for rank in range(2))), loss.mean().detach())


def _rank(rank: int, port: int, sizes: list[int], results: dict) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    first = sum(sizes[:rank])
    own = slice(first, first + sizes[rank])
    rows = features(8)[own].clone().requires_grad_()
    identities = torch.tensor([[i // 2, i] for i in range(8)])[own]
    objectives = Objectives(spec_with(itc={}), dist.group.WORLD, equal_rows=len(set(sizes)) == 1)
    loss = objectives.contrastive_rows(rows, identities)[0].sum() / 8
    loss.backward()
    results[rank] = (loss.item(), rows.grad.tolist())
    dist.destroy_process_group()
