"""Step times: schedules against formulas and a hand-drawn table, collectives and rooflines against arithmetic."""

from dataclasses import replace

import pytest
from conftest import TINY

from launcher.memory.hardware import Hardware
from launcher.memory.strategy import Strategy, ZeroOptions
from launcher.memory.table import LayerRow, LayerTable
from launcher.memory.timing import (
    Cluster,
    LayerSeconds,
    gpipe,
    one_forward_one_backward,
    pass_seconds,
    step_time,
)
from launcher.memory.tracing import Work
from models.build import layer_names
from models.schema import validate
from models.spec import ModelSpec

SPEC = validate(TINY, ModelSpec, "tiny")
GPU = Hardware(
    name="simple",
    device_type="cuda",
    memory_bytes=2**34,
    flops_32=1e12,
    flops_fp16=4e12,
    flops_bf16=4e12,
    memory_bandwidth=1e11,
    elementwise_32=1e11,
    elementwise_16=1e11,
    link_bandwidth=1e10,
    pcie_bandwidth=1e9,
    network_bandwidth=1e9,
    host_memory_bytes=2**36,
    host_bandwidth=1e10,
    latency_seconds=1e-9,
    operator_seconds=1e-12,
)


def _table(precision: str = "fp32", boundary: int = 1000) -> LayerTable:
    """Every layer: 1e9 FLOPs forward, 2e9 backward, a million parameters; the loss costs nothing."""

    def row(flops: int) -> LayerRow:
        work = [Work(count * flops, 0, 0) for count in (1, 2)]
        return LayerRow("layer", (1_000_000,), True, 100, 0, boundary, 200, 200, 300, *work)

    layer = row(1_000_000_000)
    layers = dict.fromkeys(layer_names(SPEC), layer)
    return LayerTable(SPEC, precision, 4, 12, layers, replace(row(0), parameters=()))  # type: ignore[arg-type]


def _strategy(**changes: object) -> Strategy:
    options = {"precision": "fp32", "world_size": 1, "micro_batch_size": 4, "accumulation_steps": 1} | changes
    return Strategy(spec=SPEC, **options)  # type: ignore[arg-type]


def _step(strategy: Strategy, nodes: int = 1, per_node: int = 1, hardware: Hardware = GPU):
    table = _table(strategy.precision)
    return step_time(strategy, LayerSeconds(table, hardware), Cluster(hardware, nodes, per_node))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micros", [1, 4, 40])
def test_equal_stages_give_the_formula_of_the_bubble(stages: int, micros: int) -> None:
    """(m + s - 1) × (forward + backward) for GPipe and 1F1B alike (Narayanan et al., 2021, section 2.2)."""
    pairs = [(1.0, 2.0)] * stages
    expected = (micros + stages - 1) * 3.0
    assert gpipe(pairs, micros, hop=0.0, loss=0.0) == pytest.approx(expected)
    assert one_forward_one_backward(pairs, micros, hop=0.0) == pytest.approx(expected)


def test_unequal_stages_wait_for_the_slow_one() -> None:
    """Stage 0: F 1, B 1; stage 1: F 2, B 3; drawn by hand for three micro-batches.

    1F1B    0 | F0 F1 .. .. .. .. B0 F2 .. .. ..      stage 1 starts at 1, runs 3 × 5, then B2 of stage 0
    GPipe   0 | F0 F1 F2 .. ..                        forward 1 + 3 × 2, backward 3 × 3 + 1
    """
    pairs = [(1.0, 1.0), (2.0, 3.0)]
    assert one_forward_one_backward(pairs, 3, hop=0.0) == pytest.approx(1 + 3 * 5 + 1)
    assert gpipe(pairs, 3, hop=0.0, loss=0.5) == pytest.approx(7 + 0.5 + 10)


def test_transfers_between_stages_delay_the_next_one() -> None:
    assert gpipe([(1.0, 1.0)] * 2, 1, hop=0.25, loss=0.0) == pytest.approx(4.5)
    assert one_forward_one_backward([(1.0, 1.0)] * 2, 1, hop=0.25) == pytest.approx(4.5)


def test_a_long_1f1b_is_as_long_as_played_through() -> None:
    pairs = [(1.0, 1.5), (1.2, 2.0), (0.7, 1.1)]
    fifteen, sixteen = (one_forward_one_backward(pairs, count, 0.1) for count in (15, 16))
    assert one_forward_one_backward(pairs, 60, 0.1) == pytest.approx(sixteen + 44 * (sixteen - fifteen))
    assert one_forward_one_backward(pairs, 60, 0.1) > 60 * (1.2 + 2.0)


def test_roofline_is_the_slower_of_compute_and_memory() -> None:
    assert pass_seconds(Work(10**12, 10**9, 0), GPU, "fp32", 1) == pytest.approx(1.0)
    assert pass_seconds(Work(10**12, 10**9, 0), GPU, "bf16", 1) == pytest.approx(0.25)
    assert pass_seconds(Work(10**9, 10**11, 10**11), GPU, "fp32", 1) == pytest.approx(2.0)
    slow_host = replace(GPU, operator_seconds=0.1)
    assert pass_seconds(Work(10**9, 0, 0), slow_host, "fp32", 45) == pytest.approx(4.5)
    assert pass_seconds(
        Work(10**12, 0, 0), replace(slow_host, device_type="cpu"), "fp32", 45
    ) == pytest.approx(5.5)


def test_recomputing_costs_one_forward_of_each_layer() -> None:
    count = len(layer_names(SPEC))
    plain = _step(_strategy())
    again = _step(_strategy(recompute=frozenset(["text.layer.0", "text.layer.1"]), accumulation_steps=3))
    assert plain.compute == pytest.approx(count * 3e-3, rel=1e-4)
    assert again.compute == pytest.approx(3 * plain.compute)
    assert again.recompute == pytest.approx(3 * 2 * 1e-3)


def test_gradients_cross_the_slower_of_link_and_network() -> None:
    size = 4_000_000 * len(layer_names(SPEC))
    near = _step(_strategy(world_size=4), per_node=4)
    far = _step(_strategy(world_size=4), nodes=2, per_node=2)
    assert near.communication == pytest.approx(2 * 3 / 4 * size / 1e10, rel=1e-3)
    assert far.communication == pytest.approx(2 * 3 / 4 * size / 1e9, rel=1e-3)


@pytest.mark.parametrize(("stage", "passes"), [(0, 2), (1, 2), (2, 5)])
def test_zero_2_reduces_every_micro_batch(stage: int, passes: int) -> None:
    size = 4_000_000 * len(layer_names(SPEC))
    found = _step(_strategy(world_size=2, accumulation_steps=4, zero=ZeroOptions(stage=stage)), per_node=2)
    assert found.communication == pytest.approx(passes / 2 * size / 1e10, rel=1e-3)


def test_offloading_moves_gradients_and_weights_over_pcie() -> None:
    elements = 1_000_000 * len(layer_names(SPEC))
    found = _step(_strategy(zero=ZeroOptions(stage=2, offload_optimizer=True), precision="bf16"))
    assert found.optimizer == pytest.approx(4 * elements / 1e9 + 40 * elements / 1e10)


def test_stages_in_one_process_share_the_cpu() -> None:
    cpu = replace(GPU, device_type="cpu")
    bounds = (0, 4, len(layer_names(SPEC)))
    whole = _step(_strategy(device_type="cpu"), hardware=cpu)
    piped = _step(_strategy(device_type="cpu", engine="fairscale", bounds=bounds), per_node=2, hardware=cpu)
    assert piped.compute + piped.bubble == pytest.approx(whole.compute)
