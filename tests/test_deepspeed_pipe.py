"""The DeepSpeed pipeline engine: precision, recomputation and frozen layers inside stages; what is refused."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from conftest import TINY
from test_train import losses_of, run_train
from worlds import spawn

from launcher.config.device import DeviceSupport
from launcher.distributed import Distributed
from launcher.engines.deepspeed_state import refuse_scalars
from launcher.engines.engine import MicroBatch
from launcher.plan import TrainPlan, make_plan
from models.build import build_layers
from models.errors import UserError
from models.layer import set_recompute
from models.losses import Objectives, Targets
from models.schema import validate
from models.spec import ModelSpec
from models.state import example_state

STAGES = [["image.*"], ["text.*", "fusion.*", "head"]]
TOWERS = [["image.*", "text.*"], ["fusion.*", "head"]]
"""Two floating tensors leave the first stage, so DeepSpeed alone would run its backward twice."""
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_allow_untested_optimizer": True}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


@dataclass(frozen=True)
class Case:
    config: dict[str, Any] = field(default_factory=dict)
    stages: list[list[str]] = field(default_factory=lambda: TOWERS)
    chunks: int = 4
    recompute: tuple[str, ...] = ()
    dropout: float = 0.0
    frozen: str | None = None
    steps: int = 1


PRECISIONS = {
    "fp32": (Case(), torch.float32),
    "fp32, ZeRO 1": (Case({"zero_optimization": {"stage": 1}}), torch.float32),
    "bf16": (Case(BF16), torch.bfloat16),
    "bf16, ZeRO 1": (Case(BF16 | {"zero_optimization": {"stage": 1}}), torch.bfloat16),
    "fp16": (Case(FP16), torch.float16),
    "fp16, ZeRO 1": (Case(FP16 | {"zero_optimization": {"stage": 1}}), torch.float16),
    "autocast-bf16": (Case(AUTOCAST), torch.bfloat16),
}
BLOCKS = ("image.block.*", "*.layer.*")
OTHERS = {
    "kept": Case(dropout=0.3, steps=2),
    "recomputed": Case(dropout=0.3, steps=2, recompute=BLOCKS),
    "frozen image": Case(frozen="image"),
}
CASES = {name: case for name, (case, _) in PRECISIONS.items()} | OTHERS


@dataclass
class Outcome:
    losses: list[float]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    dtypes: set[torch.dtype]
    """Of what the dense layers of this stage gave."""
    calls: dict[str, int]
    """How often each layer of this stage ran in the first step."""


def files(case: Case, folder: Path) -> dict[str, str]:
    """The plan files of a case, as ``make_plan`` takes them."""
    spec = TINY | {"objectives": {"itm": {"group": 4}, "mlm": {}}}
    for part in ("text", "fusion"):
        spec = spec | {part: spec[part] | {"dropout": case.dropout, "attention_dropout": case.dropout}}
    if case.frozen:
        spec = spec | {case.frozen: spec[case.frozen] | {"frozen": True}}
    config = {"train_batch_size": 16, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0}}
    stages = [{"name": f"s{n}", "layers": layers, "device": n} for n, layers in enumerate(case.stages)]
    partition = {"model": "tiny", "chunks": case.chunks, "stages": stages}
    found = {}
    for name, content in (
        ("model.yaml", spec),
        ("config.json", config | SGD | case.config),
        ("partition.yaml", partition | ({"recompute": list(case.recompute)} if case.recompute else {})),
    ):
        (folder / name).write_text(json.dumps(content))  # JSON is YAML
        found[name.split(".")[0]] = str(folder / name)
    return found


def plan_of(case: Case, folder: Path, world: int = 2, pipeline: str = "deepspeed") -> TrainPlan:
    device = DeviceSupport.detect()
    return make_plan(
        **files(case, folder),
        pipeline=pipeline,
        steps=3,
        epochs=None,
        samples=48,
        world_size=world,
        device=device,
    )


def run(case: Case, folder: Path, distributed: Distributed) -> Outcome:
    from launcher.engines.deepspeed_pipe import DeepSpeedPipeEngine

    folder = folder / str(distributed.rank)
    folder.mkdir(exist_ok=True)
    plan = plan_of(case, folder)
    torch.manual_seed(distributed.rank)
    layers = build_layers(plan.spec, seed=0)
    set_recompute(layers, case.recompute)
    assert plan.partition is not None
    engine = DeepSpeedPipeEngine(layers, plan.partition, plan.config, Objectives(plan.spec, dist.group.WORLD))
    dtypes: set[torch.dtype] = set()
    calls: dict[str, int] = {}

    def count(name: str) -> Any:
        return lambda *_: calls.__setitem__(name, calls.get(name, 0) + 1)

    for layer in engine.layers:
        # Before, not after: recomputation ends as soon as the last tensor that backward needs is there.
        layer.module.register_forward_pre_hook(count(layer.name))
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda _, inputs, output: dtypes.add(output.dtype))
    before = engine.named_tensors()
    batch = MicroBatch(example_state(plan.spec, 16), targets_of(plan))
    losses = [engine.train_step([batch]).loss]
    called = dict(calls)
    losses += [engine.train_step([batch]).loss for _ in range(case.steps - 1)]
    with pytest.raises(ValueError, match="8 rows in a micro-batch of 16"):
        next(engine._cut([MicroBatch(example_state(plan.spec, 8), batch.targets)]))
    after = engine.named_tensors()
    engine.close()
    return Outcome(losses, before, after, dtypes, called)


def targets_of(plan: TrainPlan) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(1, 128, (16, plan.spec.masked_positions), generator=generator)
    return tuple(Targets(labels, torch.arange(16)[:, None].expand(16, 2).contiguous()))


def rank_main(distributed: Distributed, folder: Path) -> None:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    for name, case in CASES.items():
        torch.save(run(case, folder, distributed), folder / f"{name}.{distributed.rank}")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """By case, what the rank of each stage saw."""
    folder = tmp_path_factory.mktemp("pipe")
    spawn(2, rank_main, folder)
    return {
        name: [torch.load(folder / f"{name}.{rank}", weights_only=False) for rank in (0, 1)] for name in CASES
    }


def change(outcome: Outcome) -> dict[str, torch.Tensor]:
    return {key: outcome.after[key] - before for key, before in outcome.before.items()}


@pytest.mark.parametrize("name", PRECISIONS)
def test_every_precision_takes_the_step_that_fp32_takes_on_all_stages(
    name: str, outcomes: dict[str, list[Outcome]]
) -> None:
    """Plain SGD at rate 1 moves the weights by the gradient, clipped to norm 1 over all stages together."""
    first, last = outcomes[name]
    assert first.dtypes == {PRECISIONS[name][1]} and last.dtypes == {PRECISIONS[name][1]}
    assert first.losses == last.losses and np.isfinite(first.losses).all()
    moved, expected = change(first), change(outcomes["fp32"][0])
    assert moved.keys() == expected.keys()
    flat, reference = (torch.cat([step[key].flatten() for key in sorted(step)]) for step in (moved, expected))
    assert flat.norm() == pytest.approx(1, rel=0.02)
    assert torch.nn.functional.cosine_similarity(flat, reference, dim=0) > 0.99
    assert all(moved[key].any() for key in moved if expected[key].any())


def test_each_layer_runs_once_and_is_recomputed_once(outcomes: dict[str, list[Outcome]]) -> None:
    """DeepSpeed 0.19.8 runs backward, and so recomputation, once for each floating tensor of the boundary."""
    for kept, recomputed in zip(outcomes["kept"], outcomes["recomputed"], strict=True):
        assert set(kept.calls.values()) == {4}
        again = {name for name, calls in recomputed.calls.items() if calls == 8}
        assert again == {name for name in kept.calls if ".block." in name or ".layer." in name}
        assert {recomputed.calls[name] for name in recomputed.calls.keys() - again} == {4}


def test_recomputation_with_dropout_changes_nothing(outcomes: dict[str, list[Outcome]]) -> None:
    kept, recomputed = outcomes["kept"][0], outcomes["recomputed"][0]
    assert recomputed.losses == kept.losses
    for key, tensor in kept.after.items():
        torch.testing.assert_close(recomputed.after[key], tensor, rtol=0, atol=0)


def test_frozen_layers_beside_trained_ones_in_a_stage(outcomes: dict[str, list[Outcome]]) -> None:
    moved = change(outcomes["frozen image"][0])
    assert not any(tensor.any() for key, tensor in moved.items() if key.startswith("image."))
    assert moved["text.layer.0/layer.intermediate.dense.weight"].any()


REFUSED = {
    "processes": (Case(), 3, "each of the 2 stages, and 3 processes are no multiple"),
    "chunks": (Case(chunks=3), 2, "3 chunks do not divide the 16 rows"),
    "frozen stage": (
        Case(stages=STAGES, frozen="image"),
        2,
        "stage 's0' ('image.embed' to 'image.norm') is all frozen",
    ),
    "ZeRO 2": (Case({"zero_optimization": {"stage": 2}}), 2, "stage 2 cannot be combined with the 2 stages"),
    "ZeRO 3": (Case({"zero_optimization": {"stage": 3}}), 2, "stage 3 cannot be combined with the 2 stages"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plan_that_cannot_run_is_refused_with_numbers(name: str, tmp_path: Path) -> None:
    case, world, words = REFUSED[name]
    with pytest.raises(UserError) as refused:
        plan_of(case, tmp_path, world)
    assert words in str(refused.value) and str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_batch_is_split_over_replicas_and_chunks(tmp_path: Path) -> None:
    plan = plan_of(Case(chunks=4), tmp_path, world=4)
    assert (plan.config.world_size, plan.config.micro_batch_size, plan.notes) == (2, 8, (
        "chunks of 2 rows cut the ITM groups of 4: rows find fewer negatives than without pipeline",
    ))  # fmt: skip
    assert plan_of(Case(chunks=2), tmp_path, world=4).notes == ()


def test_parameter_without_dimensions_is_refused_by_name() -> None:
    """DeepSpeed 0.19.8 flattens parameters by their first dimension and fails in ``initialize``."""
    layers = build_layers(validate(TINY, ModelSpec, "test"))
    refuse_scalars(layers)
    layers[-1].module.temperature = torch.nn.Parameter(torch.tensor(0.07))
    with pytest.raises(UserError, match=r"layer 'head': parameter temperature has no dimension"):
        refuse_scalars(layers)


def test_train_says_what_itc_compares(tiny_data: Path, tmp_path: Path) -> None:
    """Two processes of train.py; the run directory is as for every engine."""
    paths = files(Case(stages=STAGES), tmp_path)
    Path(paths["model"]).write_text(yaml.safe_dump(TINY))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_train(
        launcher,
        *(f"--{name}={path}" for name, path in paths.items()),
        *(f"--data={tiny_data}", f"--output={tmp_path / 'run'}", "--steps=3", "--pipeline=deepspeed"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "note: ITC compares the 4 rows of a chunk (× 1 replicas) with each other, not the 16" in done.stdout
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["engine"] == "deepspeed" and summary["chunks"] == 4 and summary["world_size"] == 2
    assert summary["metrics"]["candidates"] == 16 and len(losses_of(tmp_path / "run")) == 3
