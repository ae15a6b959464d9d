"""The memory model of FairScale's pipe, beside what fairscale and its allocator really do."""

from dataclasses import replace

import pytest
import torch

from launcher.memory.all_forward_first import _largest_share
from launcher.memory.simulate import predict, table_of
from launcher.memory.strategy import Strategy, ZeroOptions
from launcher.memory.weights import Parameters
from models.build import layer_names
from models.spec import load_spec

SPEC = load_spec("demo")


def strategy(**changes: object) -> Strategy:
    layers = layer_names(SPEC)
    plain = Strategy(
        spec=SPEC,
        precision="fp32",
        world_size=1,
        micro_batch_size=16,
        accumulation_steps=1,
        engine="fairscale",
        bounds=(0, layers.index("text.embed"), len(layers)),
        chunks=4,
        device_type="cpu",
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", [2, 3])
def test_where_a_stage_ends_hardly_matters_to_one_process(stages: int) -> None:
    """On the CPU all stages share one process: the same tensors, whatever the cut."""
    layers = len(layer_names(SPEC))
    bounds = (0, *(layers * number // stages for number in range(1, stages)), layers)
    cut = predict(strategy(bounds=bounds)).peak_bytes["cpu"]
    assert cut == pytest.approx(predict(strategy()).peak_bytes["cpu"], rel=0.02)


def test_chunks_save_nothing_that_all_of_them_keep() -> None:
    """All chunks are in flight at once, so activations are those of the whole batch, unlike under 1F1B."""

    def activations(chunks: int) -> int:
        (device,) = predict(strategy(chunks=chunks)).devices
        return max(moment.items["activations"] for moment in device.timeline if moment.phase == "loss")

    assert activations(8) == pytest.approx(activations(2), rel=0.02)
    whole, half = (predict(strategy(micro_batch_size=rows)).devices[0] for rows in (16, 8))
    kept = [max(m.items["activations"] for m in d.timeline if m.phase == "loss") for d in (whole, half)]
    assert kept[0] == pytest.approx(2 * kept[1], rel=0.02)


def test_the_rank_with_the_largest_shard_is_that_of_fairscale() -> None:
    """``OSS`` itself splits the model's parameters; only its process group is missing."""
    from fairscale.optim import OSS

    from models.build import build_layers

    names = layer_names(SPEC)
    plan = strategy(world_size=3, zero=ZeroOptions(stage=1))
    share = _largest_share(Parameters(table_of(plan), names), plan)
    parameters = [p for layer in build_layers(SPEC, device="meta") for p in layer.parameters()]
    oss = object.__new__(OSS)
    oss.in_super_constructor = True
    torch.optim.Optimizer.__init__(oss, [p for p in parameters if p.requires_grad], {})
    oss._partition_parameters, oss.world_size = [], 3
    largest = max(sum(p.numel() for p in rank[0]["params"]) for rank in oss.partition_parameters())
    found = {
        (layer.name, index): p.numel()
        for layer in build_layers(SPEC, device="meta")
        for index, p in enumerate(layer.parameters())
    }
    assert sum(found[key] for key in share) == largest


def test_stages_on_gpus_have_a_prediction_each() -> None:
    found = predict(strategy(device_type="cuda"))
    assert list(found.peak_bytes) == ["cuda:0", "cuda:1"]
    assert all(device.peak_bytes for device in found.devices)
