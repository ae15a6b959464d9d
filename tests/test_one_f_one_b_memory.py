"""The memory model of DeepSpeed's pipeline: against DeepSpeed's own schedule, and against measured ranks."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import spawn

from launcher.config.device import DeviceSupport
from launcher.distributed import Distributed
from launcher.engines.engine import MicroBatch
from launcher.memory.measure import MemoryMeter
from launcher.memory.one_f_one_b import instructions
from launcher.memory.prediction import DevicePrediction
from launcher.memory.simulate import predict
from launcher.memory.strategy import Strategy
from launcher.plan import TrainPlan, make_plan
from models.build import build_layers, layer_names
from models.layer import set_recompute
from models.losses import Objectives, Targets
from models.spec import load_spec
from models.state import example_state

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "autocast, ZeRO 1": {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 300_000},
    },
}
ROWS, CHUNKS = 16, 4
SCALARS = 64
"""Bytes of a few losses that the ledger may have left over."""


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_instructions_are_those_of_deepspeed(stages: int, micro_batches: int) -> None:
    from deepspeed.runtime.pipe.schedule import ReduceTiedGrads, TrainSchedule

    for stage in range(stages):
        steps = TrainSchedule(micro_batches=micro_batches, stages=stages, stage_id=stage)
        expected = [
            (type(command).__name__, command.kwargs.get("buffer_id", 0))
            for commands in steps
            for command in commands
            if not isinstance(command, ReduceTiedGrads)
        ]
        assert [tuple(found) for found in instructions(micro_batches, stages, stage)] == expected


def test_each_stage_keeps_as_many_micro_batches_as_are_under_way() -> None:
    """A micro-batch more costs the same each time, until ``stages - stage`` of them are under way."""
    names = layer_names(load_spec("demo"))
    strategy = Strategy(
        spec=load_spec("demo"),
        precision="fp32",
        world_size=3,
        micro_batch_size=4,
        accumulation_steps=1,
        engine="deepspeed",
        bounds=(0, names.index("text.embed"), names.index("fusion.layer.0"), len(names)),
        optimizer="SGD",
    )
    kept = [
        [activations(device) for device in predict(replace(strategy, accumulation_steps=count)).devices]
        for count in (1, 2, 3, 4, 9)
    ]
    first, middle, last = zip(*kept, strict=True)
    one, two, three = first[:3]
    assert 0 < two - one == pytest.approx(three - two, abs=SCALARS)
    assert first[3:] == pytest.approx([three, three], abs=SCALARS)
    assert middle[0] < middle[1]
    assert middle[2:] == pytest.approx([middle[1]] * 3, abs=SCALARS)
    # The second place of the last stage keeps outputs and inputs, but no activations.
    assert last[1:] == pytest.approx([last[1]] * 4, abs=SCALARS)
    assert last[0] < last[1] < last[0] + two - one


def activations(device: DevicePrediction) -> int:
    """What is kept when the backward passes begin to be possible: the highest point of the forward passes."""
    return max(moment.items.get("activations", 0) for moment in device.timeline if moment.phase == "forward")


def plan_of(folder: Path, config: dict[str, Any]) -> TrainPlan:
    partition = {
        "model": "demo",
        "chunks": CHUNKS,
        "stages": [
            {"name": "image", "layers": ["image.*"], "device": 0},
            {"name": "rest", "layers": ["text.*", "fusion.*", "head"], "device": 1},
        ],
        "recompute": ["fusion.*"],
    }
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    settings = {"train_batch_size": ROWS, "gradient_clipping": 1.0, "optimizer": optimizer} | config
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "partition.yaml").write_text(json.dumps(partition))  # JSON is YAML
    return make_plan(
        config=str(folder / "config.json"),
        model="demo",
        partition=str(folder / "partition.yaml"),
        pipeline="deepspeed",
        steps=3,
        epochs=None,
        samples=ROWS * 3,
        world_size=2,
        device=DeviceSupport.detect(),
    )


def rank_main(distributed: Distributed, folder: Path) -> None:
    """Train each case on this rank; write the peak of its allocator."""
    peaks = {}
    for name, config in CASES.items():
        plan = plan_of(folder / f"{name}.{distributed.rank}", config)
        gc.collect()  # engines are cycles
        meter = MemoryMeter(torch.device("cpu"))
        meter.start()
        train(plan)
        peaks[name] = meter.stop()["cpu"]
    (folder / f"peaks.{distributed.rank}").write_text(json.dumps(peaks))


def train(plan: TrainPlan) -> None:
    from launcher.engines.deepspeed_pipe import DeepSpeedPipeEngine

    layers = build_layers(plan.spec, seed=0)
    set_recompute(layers, plan.recompute)
    assert plan.partition is not None
    engine = DeepSpeedPipeEngine(layers, plan.partition, plan.config, Objectives(plan.spec, dist.group.WORLD))
    labels = torch.randint(1, 128, (ROWS, plan.spec.masked_positions))
    targets = Targets(labels, torch.arange(ROWS)[:, None].expand(ROWS, 2).contiguous())
    batch = MicroBatch(tuple(example_state(plan.spec, ROWS)), tuple(targets))
    for _ in range(3):
        engine.train_step([batch])
    engine.close()


def test_predicted_peak_of_each_stage_is_the_measured_one(tmp_path: Path) -> None:
    spawn(2, rank_main, tmp_path)
    measured = [json.loads((tmp_path / f"peaks.{rank}").read_text()) for rank in (0, 1)]
    for name, config in CASES.items():
        strategy = Strategy.of(plan_of(tmp_path / name, config), world_size=2, device_type="cpu")
        for rank, device in enumerate(predict(strategy).devices):
            assert device.device == f"rank {rank}"
            assert 0.98 <= device.peak_bytes / measured[rank][name] <= 1.04, (name, rank)
