"""Balancing against brute force and FairScale; the checked-in partitions against a fresh generation."""

import random
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn

from launcher.cli import main
from launcher.partitions import FOLDER, MODELS, balanced, write_all
from models.balance import balance, layer_costs, timed_costs
from models.build import build_layers, layer_names
from models.errors import UserError
from models.partition import load_partition
from models.spec import load_spec


def worst(costs: list[float], sizes: list[int]) -> float:
    first, found = 0, 0.0
    for size in sizes:
        found = max(found, sum(costs[first : first + size]))
        first += size
    return found


@pytest.mark.parametrize("seed", range(30))
def test_is_as_good_as_the_best_of_all_splits(seed: int) -> None:
    source = random.Random(seed)
    count, stages = source.randint(3, 9), source.randint(1, 3)
    costs = [source.choice([0.0, 1.0, source.random() * 10]) for _ in range(count)]
    best = min(
        worst(costs, [b - a for a, b in zip((0, *cuts), (*cuts, count), strict=True)])
        for cuts in combinations(range(1, count), stages - 1)
    )
    found = balance(costs, stages)
    assert len(found) == stages and sum(found) == count and min(found) >= 1
    assert worst(costs, found) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_is_never_worse_than_fairscale_on_the_same_costs(seed: int) -> None:
    from fairscale.nn.pipe.balance import blockpartition

    source = random.Random(seed)
    costs = [source.randint(1, 100) for _ in range(28)]
    for stages in (2, 4, 8):
        theirs = [len(block) for block in blockpartition.solve(costs, partitions=stages)]
        assert worst(costs, balance(costs, stages)) <= worst(costs, theirs)


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(UserError, match="5 stages cannot be made of 3 layers"):
        balance([1, 1, 1], 5)


def test_costs_are_those_of_the_layers() -> None:
    spec = load_spec("bert_vit_base")
    layers = build_layers(spec, device="meta")
    parameters = layer_costs(spec, layers, "parameters")
    assert sum(parameters) == sum(p.numel() for p in nn.ModuleList(layers).parameters())
    flops = dict(zip(layer_names(spec), layer_costs(spec, layers, "flops", rows=2), strict=True))
    # One ViT-B block on N tokens: 24·N·D² + 4·N²·D (Kaplan et al., 2020, table 1, forward, in FLOPs); ×3.
    tokens, width = 197, 768
    expected = 3 * 2 * (24 * tokens * width**2 + 4 * tokens**2 * width)
    assert flops["image.block.0"] == pytest.approx(expected, rel=0.01)
    assert flops["image.block.0"] == flops["image.block.11"]


def test_checked_in_partitions_are_what_the_command_writes(tmp_path: Path) -> None:
    written = write_all(tmp_path)
    assert sorted(path.name for path in written) == sorted(path.name for path in FOLDER.glob("*.yaml"))
    for path in written:
        assert path.read_bytes() == (FOLDER / path.name).read_bytes(), path.name


@pytest.mark.parametrize("model", MODELS)
def test_checked_in_partitions_fit_their_model(model: str) -> None:
    names = layer_names(load_spec(model))
    files = sorted(FOLDER.glob(f"{model}.*.yaml"))
    assert len(files) == 6
    for path in files:
        load_partition(path).validate_against(names, model)


def test_balanced_beats_image_alone() -> None:
    spec = load_spec("bert_vit_base")
    costs = layer_costs(spec, build_layers(spec, device="meta"), "flops")
    alone = load_partition(FOLDER / "bert_vit_base.image-alone.yaml")
    names = layer_names(spec)
    assert worst(costs, balanced(spec, 2, costs).balance_of(names)) <= worst(costs, alone.balance_of(names))
    assert torch.tensor(costs).sum() > 0


def test_time_is_measured_once_for_each_kind_of_layer(tiny_spec_file: Path) -> None:
    spec = load_spec(tiny_spec_file)
    layers = build_layers(spec)
    runs: Counter[str] = Counter()
    for layer in layers:
        layer.module.register_forward_hook(lambda *_, name=layer.name: runs.update([name]))
    costs = dict(
        zip(layer_names(spec), timed_costs(spec, layers, torch.device("cpu"), repeats=3), strict=True)
    )
    assert all(seconds > 0 for seconds in costs.values())
    # One run shows the shapes, one warms up, three are measured; an equal block only shows its shapes.
    assert runs["text.layer.0"] == 5 and runs["text.layer.1"] == 1
    assert costs["text.layer.0"] == costs["text.layer.1"]
    assert costs["image.block.0"] == costs["image.block.1"]
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())


@pytest.mark.parametrize("device", ["cpu", "flops"])
def test_partition_by_time_is_balanced_on_the_costs_it_reports(
    device: str, tiny_spec_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two.yaml"
    words = ["partition", f"--model={tiny_spec_file}", "--stages=2", f"--device={device}", f"--output={path}"]
    assert main(words) == 0
    partition = load_partition(path)
    partition.validate_against(layer_names(load_spec(tiny_spec_file)), "tiny")
    reported = [
        float(line.split()[-5]) for line in capfd.readouterr().err.splitlines() if line.startswith("stage-")
    ]
    assert len(reported) == 2 and sum(reported) == pytest.approx(100, abs=0.2)
    assert path.read_text().splitlines()[0].endswith(f"--by time --device {device}`.")


@pytest.mark.parametrize("stages", [0, 12])
def test_number_of_stages_that_the_model_does_not_have(
    stages: int, tiny_spec_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["partition", f"--model={tiny_spec_file}", f"--stages={stages}", "--device=flops"]) == 2
    assert f"--stages {stages}: tiny has 11 layers; give 1 to 11 stages" in capfd.readouterr().err
