"""All engines train alike: same data, dropout 0, fp32; each starts from one saved state.

Three worlds are spawned once each, and run their engines one after the other. An engine is built with a seed of
its own, so its losses agree with the others' only if it loaded every tensor, master copies included.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from conftest import TINY
from worlds import spawn

from launcher.config.device import DeviceSupport
from launcher.data.batches import FixedBatches
from launcher.data.loader import Loader
from launcher.data.order import DataPosition
from launcher.data.store import Store
from launcher.distributed import Distributed
from launcher.engines import build_engine
from launcher.inputs import Inputs
from launcher.plan import make_plan
from models.build import build_layers
from models.layer import named_tensors, set_recompute
from models.losses import Objectives
from models.spec import load_spec
from models.state import example_state

ROWS, STEPS = 16, 5
STAGES = {
    2: [["image.*"], ["text.*", "fusion.*", "head"]],
    3: [["image.*"], ["text.*"], ["fusion.*", "head"]],
    # A boundary inside the fusion has three floating tensors; the head alone uses one of them less.
    4: [["image.*", "text.embed"], ["text.layer.*", "fusion.embed"], ["fusion.layer.*"], ["head"]],
}


@dataclass(frozen=True)
class Case:
    world: int
    pipeline: str | None = None
    stages: int = 1
    chunks: int = 1
    zero: int = 0
    micro: int | None = None
    spec: str = "tiny"
    recompute: tuple[str, ...] = ()


CASES = {
    "ZeRO 1": Case(2, zero=1),
    "ZeRO 2": Case(2, zero=2),
    "ZeRO 3": Case(2, zero=3),
    "FairScale, 2 stages": Case(1, "fairscale", 2, chunks=4),
    "FairScale, 3 stages": Case(1, "fairscale", 3, chunks=4, recompute=("*.layer.*",)),
    "FairScale, 4 stages": Case(1, "fairscale", 4, chunks=2, recompute=("*.layer.*",)),
    "FairScale, chunks of 6, 6 and 4 rows": Case(1, "fairscale", 2, chunks=3, spec="no-itm"),
    "FairScale, 2 stages × 2 ranks": Case(2, "fairscale", 2, chunks=2),
    "FairScale, 2 stages × 2 ranks, OSS": Case(2, "fairscale", 2, chunks=2, zero=1),
    # Without chunks, the last stage sees what one process sees: ITC agrees as well.
    "DeepSpeed, 2 stages, ITC": Case(2, "deepspeed", 2),
    "DeepSpeed, 2 stages": Case(2, "deepspeed", 2, chunks=4, spec="no-itc", recompute=("*.layer.*",)),
    "DeepSpeed, 2 stages, 2 micro-batches": Case(2, "deepspeed", 2, chunks=2, micro=8, spec="no-itc"),
    "DeepSpeed, 2 stages × 2 ranks, ITC": Case(4, "deepspeed", 2, zero=1),
    "DeepSpeed, 2 stages × 2 ranks": Case(4, "deepspeed", 2, chunks=2, spec="no-itc"),
    "DeepSpeed, 4 stages": Case(4, "deepspeed", 4, chunks=2, spec="no-itc", recompute=("*.layer.*",)),
}
FIRST = {name: Case(1, spec=name) for name in ("tiny", "no-itc", "no-itm")}


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    kept: bool
    """Loading and saving gave back every tensor, bit by bit."""
    tensors: dict[str, torch.Tensor]
    evaluated: float
    """Sum over the head's output for held-out rows."""


def run(case: Case, folder: Path, distributed: Distributed, seed: int) -> Outcome:
    """Load ``SPEC.pt``, train, evaluate."""
    config = {
        "train_batch_size": ROWS,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
        "zero_optimization": {"stage": case.zero},
    }
    if case.micro:
        config["train_micro_batch_size_per_gpu"] = case.micro
    (folder / f"{distributed.rank}.json").write_text(json.dumps(config))
    stages = [
        {"name": f"s{n}", "layers": layers, "device": n}
        for n, layers in enumerate(STAGES.get(case.stages, []))
    ]
    partition = folder / f"{distributed.rank}.partition.yaml"
    partition.write_text(
        yaml.safe_dump(
            {"model": "tiny", "chunks": case.chunks, "stages": stages, "recompute": list(case.recompute)}
        )
    )
    store = Store.open(folder / "data" / "train")
    plan = make_plan(
        config=str(folder / f"{distributed.rank}.json"),
        model=str(folder / f"{case.spec}.yaml"),
        partition=str(partition) if case.pipeline else None,
        pipeline=case.pipeline,
        steps=STEPS,
        epochs=None,
        samples=len(store),
        world_size=distributed.world_size,
        device=DeviceSupport.detect(),
    )
    device = torch.device("cpu")
    layers = build_layers(plan.spec, seed=seed)
    if plan.recompute:
        set_recompute(layers, plan.recompute)
    engine = build_engine(
        layers, plan, Objectives(plan.spec, dist.group.WORLD), distributed, [device] * case.stages
    )
    start = torch.load(folder / f"{case.spec}.pt")
    engine.load_named_tensors(start)
    loaded = engine.named_tensors()
    kept = not loaded or (
        loaded.keys() == start.keys() and all(torch.equal(loaded[key], start[key]) for key in start)
    )
    per_step = plan.config.global_batch_size // plan.config.micro_batch_size
    batches = FixedBatches(len(store), plan.config.micro_batch_size, per_step, plan.spec.text.length)
    inputs = Inputs.create(plan.spec, store.manifest, 0, device, per_step)
    stream = iter(
        Loader(
            store, batches, rank=engine.data_rank, world_size=engine.data_world, start=DataPosition(seed=0)
        )
    )
    count = per_step // engine.data_world
    steps = [[inputs(next(stream)) for _ in range(count)] for _ in range(STEPS)]
    losses = [engine.train_step(step).loss for step in steps]
    # Fewer rows than in training: the last batch of an evaluation.
    outputs = engine.evaluate(example_state(plan.spec, 3))
    evaluated = float(sum(tensor.float().sum() for tensor in outputs[:2]))
    tensors = engine.named_tensors()
    engine.close()
    return Outcome(losses, kept, tensors, evaluated)


def rank_main(distributed: Distributed, folder: Path) -> None:
    """One rank of a world: all of its cases in turn."""
    for number, (name, case) in enumerate(CASES.items()):
        if case.world == distributed.world_size:
            outcome = run(case, folder, distributed, seed=number)
            torch.save(outcome, folder / f"{name}.{distributed.rank}.outcome")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    path = tmp_path_factory.mktemp("engines")
    (path / "data").symlink_to(tiny_data)
    for name in FIRST:
        objectives = {key: value for key, value in TINY["objectives"].items() if name != f"no-{key}"}
        (path / f"{name}.yaml").write_text(yaml.safe_dump(TINY | {"objectives": objectives}))
    return path


@pytest.fixture(scope="module")
def first(folder: Path, initialised: dict[str, str]) -> dict[str, Outcome]:
    """One process without pipeline, for each spec; it saves what all others start from."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in initialised.items():
            patch.setenv(name, value)
        found = {}
        alone = Distributed(0, 0, 1, 1, 0, 1, "127.0.0.1", 0, "python")
        for name, case in FIRST.items():
            layers = build_layers(load_spec(folder / f"{name}.yaml"), seed=77)
            torch.save(dict(named_tensors(layers)), folder / f"{name}.pt")
            found[name] = run(case, folder, alone, seed=99)
        return found


@pytest.fixture(scope="module")
def outcomes(
    folder: Path, first: dict[str, Outcome], initialised: dict[str, str]
) -> dict[str, list[Outcome]]:
    alone = Distributed(0, 0, 1, 1, 0, 1, "127.0.0.1", 0, "python")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in initialised.items():
            patch.setenv(name, value)
        for name, case in CASES.items():
            if case.world == 1:
                found[name] = [run(case, folder, alone, seed=1)]
    for world in (2, 4):
        spawn(world, rank_main, folder)
    for name, case in CASES.items():
        if case.world > 1:
            found[name] = [
                torch.load(folder / f"{name}.{rank}.outcome", weights_only=False)
                for rank in range(case.world)
            ]
    return found


@pytest.mark.parametrize("name", CASES)
def test_engine_trains_as_one_process_does(
    name: str, outcomes: dict[str, list[Outcome]], first: dict[str, Outcome]
) -> None:
    expected = first[CASES[name].spec]
    for rank, found in enumerate(outcomes[name]):
        np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-4, err_msg=f"rank {rank}")
        assert found.evaluated == pytest.approx(expected.evaluated, rel=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_state_moves_into_and_out_of_every_engine(
    name: str, outcomes: dict[str, list[Outcome]], first: dict[str, Outcome]
) -> None:
    assert all(found.kept for found in outcomes[name])
    saved, *others = (found.tensors for found in outcomes[name])
    assert not any(others)
    expected = first[CASES[name].spec].tensors
    assert saved.keys() == expected.keys()
    for key, tensor in saved.items():
        torch.testing.assert_close(
            tensor, expected[key], atol=1e-4, rtol=1e-3, msg=lambda text, key=key: f"{key}: {text}"
        )
