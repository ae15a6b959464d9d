"""``vlfit plan``: what it finds fits, is the fastest, and its files make exactly the plan that was predicted."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import TINY

from launcher.cli import main
from launcher.memory.candidates import candidates, recompute_sets
from launcher.memory.hardware import find_hardware
from launcher.memory.plan_files import ZERO_SECTIONS, write_plan, zero_options
from launcher.memory.scaling import anchors, scaled_table
from launcher.memory.search import choices_of, evaluate, search, strategy_of, table_for
from launcher.memory.simulate import predict
from launcher.memory.strategy import Strategy
from launcher.memory.table import layer_table
from launcher.memory.timing import Cluster
from launcher.plan import make_plan
from models.build import layer_names
from models.schema import validate
from models.spec import ModelSpec

SPEC = validate(TINY, ModelSpec, "tiny")
A100 = find_hardware("A100-40")
COMMON = ["--gpu", "a100-40", "--gpus-per-node", "2"]


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def spec_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("spec") / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return str(path)


def _all(nodes: int = 1, per_node: int = 4, batch: int = 64) -> list[Strategy]:
    return list(candidates(SPEC, Cluster(A100, nodes, per_node), batch, A100.precisions))


def test_candidates_keep_batch_groups_and_devices() -> None:
    found = _all()
    assert len(set(found)) == len(found)
    assert {strategy.engine for strategy in found} == {"zero", "fairscale", "deepspeed"}
    assert {strategy.stages for strategy in found} == {1, 2, 4}
    for strategy in found:
        assert strategy.global_batch_size == 64
        assert strategy.gpus == 4
        assert strategy.micro_batch_size % SPEC.group == 0
        assert strategy.rows % SPEC.group == 0
        assert strategy.zero.stage < 2 or strategy.stages == 1


def test_a_rank_with_less_than_a_group_takes_all_its_rows() -> None:
    assert {strategy.micro_batch_size for strategy in _all(batch=8) if strategy.engine == "zero"} == {2}


@pytest.mark.parametrize("rows", [6, 16])
def test_scaled_tables_equal_traced_ones(rows: int) -> None:
    scaled = scaled_table(SPEC, "bf16", rows, "cuda", False, False)
    traced = layer_table(SPEC, precision="bf16", rows=rows)
    assert rows not in anchors(SPEC)
    for name, row in traced.layers.items():
        found = scaled.layers[name]
        assert (found.kept_bytes, found.boundary_bytes) == (row.kept_bytes, row.boundary_bytes)
        if name != "fusion.embed":  # likeness of all pairs of its rows: grows with their square, and is small
            assert (found.forward.flops, found.backward.flops) == (row.forward.flops, row.backward.flops)
    flops = [sum(row.forward.flops for row in table.layers.values()) for table in (scaled, traced)]
    assert flops[0] == pytest.approx(flops[1], rel=0.01)
    base = Strategy(SPEC, "bf16", 1, rows, 1)
    assert predict(base, scaled).worst.peak_bytes == pytest.approx(predict(base).worst.peak_bytes, rel=0.02)


@pytest.mark.parametrize("gap", [0, 1, 2])
def test_search_finds_the_fastest_of_all_that_fit(gap: int) -> None:
    """Against predicting every candidate with every named set of layers to recompute."""
    cluster = Cluster(A100, 1, 1)
    everything = [
        (base, label, chosen)
        for base in candidates(SPEC, cluster, 16, ["fp32", "bf16"])
        for label, chosen in recompute_sets(SPEC).items()
    ]
    limits = _limits(2**40)
    planned = [
        evaluate(strategy, cluster, limits, predict(strategy, table_for(strategy)), label)
        for base, label, chosen in everything
        for strategy in [replace(base, recompute=chosen)]
    ]
    # A limit in one of the widest gaps: no plan is so near to it that rounding decides.
    sizes = sorted(plan.needed_bytes for plan in planned)
    below, above = sorted(itertools.pairwise(sizes), key=lambda pair: pair[0] / pair[1])[gap]
    limit = (below + above) // 2
    fastest = min(plan.step_seconds for plan in planned if plan.needed_bytes <= limit)
    small = replace(A100, memory_bytes=limit)
    answer = search(SPEC, Cluster(small, 1, 1), 16, margin=0.0, precisions=["fp32", "bf16"])
    assert answer.best is not None
    assert answer.best.needed_bytes <= limit
    assert answer.best.step_seconds <= fastest * (1 + 1e-9)  # a chosen set can beat the named ones
    assert [plan.step_seconds for plan in answer.plans] == sorted(plan.step_seconds for plan in answer.plans)
    assert all(plan.over_bytes > 0 for plan in answer.nearest_misses)


def test_chosen_layers_fit_where_no_recomputation_does_not() -> None:
    cluster = Cluster(A100, 1, 1)
    base = Strategy(SPEC, "fp32", 1, 16, 1)
    sets = recompute_sets(SPEC)
    none, every = (
        predict(replace(base, recompute=sets[name]), table_for(base)).worst.peak_bytes
        for name in ("none", "all")
    )
    assert every < none
    small = replace(A100, memory_bytes=(none + every) // 2)
    answer = search(SPEC, replace(cluster, hardware=small), 16, margin=0.0, precisions=["fp32"])
    plan = next(plan for plan in answer.plans if plan.choices["micro_batch_size"] == 16)
    assert len(plan.choices["recomputed_layers"]) > 0
    assert plan.needed_bytes <= small.memory_bytes


@pytest.mark.parametrize(
    ("engine", "name"),
    [("zero", name) for name in ZERO_SECTIONS]
    + [(engine, name) for engine in ("fairscale", "deepspeed") for name in ("0", "1")],
)
def test_written_files_make_the_same_strategy(engine: str, name: str, tmp_path: Path, spec_file: str) -> None:
    layers = layer_names(SPEC)
    strategy = Strategy(
        spec=SPEC,
        precision="autocast-bf16" if engine == "fairscale" else "bf16",
        world_size=2 if engine == "fairscale" else 4,
        micro_batch_size=8,
        accumulation_steps=2,
        zero=zero_options(name),
        engine=engine,  # type: ignore[arg-type]
        bounds=() if engine == "zero" else (0, 4, len(layers)),
        chunks=2 if engine == "fairscale" else 1,
        recompute=frozenset(["image.block.1", "fusion.layer.0", "fusion.layer.1"]),
    )
    config, partition, script = write_plan(
        strategy, tmp_path, model=spec_file, nodes=1, per_node=4, command="vlfit plan"
    )
    plan = make_plan(
        config=str(config),
        model=spec_file,
        partition=str(partition),
        pipeline=None if engine == "zero" else engine,
        steps=1,
        epochs=None,
        samples=0,
        world_size=strategy.world_size,
        device=A100.support,
    )
    assert Strategy.of(plan, strategy.world_size, "cuda") == strategy
    assert strategy_of(SPEC, json.loads(json.dumps(choices_of(strategy, "optimal")))) == strategy
    text = script.read_text()
    assert f"--ntasks-per-node={strategy.world_size}" in text
    assert "--gpus-per-node=4" in text


def test_json_is_as_designed_and_the_second_call_gives_the_same(
    spec_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--model", spec_file, *COMMON, "--global-batch", "32", "--json"]
    outputs = []
    for _ in range(2):
        assert (
            main([*command, "--write", str(tmp_path / "plan"), "--plot", str(tmp_path / "memory.png")]) == 0
        )
        outputs.append(json.loads(capsys.readouterr().out))
    first = outputs[0]
    assert outputs[1] == first
    assert {"plans_searched", "best", "plans", "nearest_misses"} <= set(first)
    assert first["best"] == first["plans"][0]
    assert {"peak_bytes", "phase", "items", "step_seconds", "precision"} <= set(first["best"])
    for device, peak in first["best"]["peak_bytes"].items():
        assert sum(first["best"]["items"][device].values()) == peak
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    # Estimating what was written says the same again.
    files = [
        "--config",
        str(tmp_path / "plan/config.json"),
        "--partition",
        str(tmp_path / "plan/partition.yaml"),
    ]
    best = first["best"]
    engine = [] if best["engine"] == "zero" else ["--pipeline", best["engine"]]
    command = ["estimate", "--model", spec_file, *files, *engine, "--gpu", "A100-40", "--json"]
    assert main([*command, "--world-size", str(best["world_size"])]) == 0
    estimated = json.loads(capsys.readouterr().out)
    assert estimated["peak_bytes"] == best["peak_bytes"]
    assert estimated["step_seconds"] == best["step_seconds"]


def test_nothing_fits_is_exit_4_and_says_what_is_nearest(
    spec_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", spec_file, *COMMON, "--global-batch", "32", "--memory", "0.0001"]) == 4
    shown = capsys.readouterr()
    assert "nothing fits" in shown.err
    assert "needs" in shown.err
    assert len(shown.err.splitlines()) == 1
    assert "too many" in shown.out


def test_more_nodes_show_their_efficiency(spec_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", spec_file, *COMMON, "--global-batch", "32", "--nodes", "1,2,3"]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["nodes"]
    assert [row["nodes"] for row in rows] == [1, 2, 3]
    assert rows[0]["efficiency"] == 1.0
    assert 0 < rows[1]["efficiency"] < 1.0
    expected = rows[0]["best"]["step_seconds"] / (2 * rows[1]["best"]["step_seconds"])
    assert rows[1]["efficiency"] == pytest.approx(expected, abs=1e-4)
    assert not rows[2]["divides"]
    assert main(command) == 0
    assert "network model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "K80", "--global-batch", "32"], "K80: not known; give one of V100-16"),
        (["--gpu", "T4", "--global-batch", "0"], "--global-batch 0: at least 1"),
        (["--gpu", "T4", "--global-batch", "-8"], "--global-batch -8: at least 1"),
        (["--gpu", "T4", "--global-batch", "32", "--nodes", "0"], "--nodes 0"),
        (["--gpu", "T4", "--global-batch", "32", "--nodes", "1,x"], "--nodes 1,x"),
        (["--gpu", "T4", "--global-batch", "32", "--gpus-per-node", "-1"], "--gpus-per-node -1"),
        (["--gpu", "T4", "--global-batch", "32", "--memory", "0"], "--memory 0"),
        (["--gpu", "T4", "--global-batch", "32", "--margin", "1"], "--margin 1"),
        (["--gpu", "T4", "--global-batch", "31", "--gpus-per-node", "4"], "the nearest that can is 32"),
        (["--gpu", "T4", "--global-batch", "33", "--gpus-per-node", "8"], "the nearest that can is 32"),
        (["--gpu", "T4", "--global-batch", "3", "--gpus-per-node", "8"], "the nearest that can is 8"),
        (["--gpu", "T4", "--global-batch", "8", "--precision", "bf16"], "T4: no bf16"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], message: str, spec_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", spec_file, *options]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1


def _limits(size: int):
    from launcher.memory.search import Limits

    return Limits(size, size)
