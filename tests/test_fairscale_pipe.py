"""The FairScale engine beside the ZeRO engine: same losses, same schedule, nothing left behind."""

import copy
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import yaml
from conftest import TINY
from test_train import FP32, TRAIN, engine_for, losses_of, run_train, write_config

from launcher.config import load_config
from launcher.config.device import DeviceSupport
from launcher.distributed import Distributed
from launcher.engines.fairscale_pipe import FairScalePipeEngine
from models.build import build_layers
from models.layer import named_tensors
from models.losses import Objectives
from models.partition import PartitionSpec, StageSpec
from models.spec import load_spec
from models.state import State, StateError

SCHEDULE = {
    "type": "WarmupCosineLR",
    "params": {"total_num_steps": 5, "warmup_num_steps": 2, "warmup_type": "linear"},
}
STAGES = {
    2: [["image.*"], ["text.*", "fusion.*", "head"]],
    3: [["image.*"], ["text.*"], ["fusion.*", "head"]],
}


def partition_of(stages: int, chunks: int = 4, recompute: tuple[str, ...] = ()) -> PartitionSpec:
    specs = [
        StageSpec(name=f"s{n}", layers=tuple(layers), device=n) for n, layers in enumerate(STAGES[stages])
    ]
    return PartitionSpec(model="tiny", chunks=chunks, stages=tuple(specs), recompute=recompute)


def pipe_engine(
    partition: PartitionSpec, config: Path, spec_file: Path, seed: int = 0
) -> FairScalePipeEngine:
    spec = load_spec(spec_file)
    resolved = load_config(config).resolve(world_size=1, device=DeviceSupport.detect())
    distributed = Distributed(0, 0, 1, 1, 0, 1, "127.0.0.1", 0, "python")
    layers = build_layers(spec, seed=seed)
    return FairScalePipeEngine(
        layers, partition, resolved, Objectives(spec), distributed, 5, [torch.device("cpu")] * 3
    )


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("recompute", [(), ("*.layer.*", "image.block.*")])
def test_losses_and_rates_equal_the_zero_engines(
    stages: int,
    recompute: tuple[str, ...],
    process_group: None,
    tiny_spec_file: Path,
    tiny_data: Path,
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path, scheduler=SCHEDULE)
    zero, batches = engine_for(config, tiny_spec_file, tiny_data)
    steps = [next(batches) for _ in range(5)]
    expected = [zero.train_step(step) for step in steps]
    weights = zero.named_tensors()
    zero.close()
    pipe = pipe_engine(partition_of(stages, recompute=recompute), config, tiny_spec_file)
    found = [pipe.train_step(step) for step in steps]
    np.testing.assert_allclose([step.loss for step in found], [step.loss for step in expected], rtol=1e-4)
    np.testing.assert_allclose([step.lr for step in found], [step.lr for step in expected], rtol=1e-6)
    for key, tensor in pipe.named_tensors().items():
        torch.testing.assert_close(tensor, weights[key], atol=1e-4, rtol=1e-3)
    pipe.close()


def test_weights_move_between_the_engines(
    process_group: None, tiny_spec_file: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    zero, batches = engine_for(config, tiny_spec_file, tiny_data, seed=1)
    zero.train_step(next(batches))
    saved = zero.named_tensors()
    zero.close()
    pipe = pipe_engine(partition_of(3), config, tiny_spec_file, seed=2)
    pipe.load_named_tensors(saved)
    found = pipe.named_tensors()
    pipe.close()
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[key], saved[key]) for key in saved)


def test_stages_really_run_in_bf16(
    process_group: None, tiny_spec_file: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """An outer autocast would not reach Pipe's worker threads: everything would silently run in fp32."""
    config = write_config(tmp_path, bf16={"enabled": True})
    engine, batches = engine_for(config, tiny_spec_file, tiny_data)
    step = next(batches)
    engine.close()
    pipe = pipe_engine(partition_of(2), config, tiny_spec_file)
    seen: list[tuple[torch.dtype, bool]] = []
    dense = next(
        layer for layer in pipe.layers if layer.name == "text.layer.0"
    ).module.layer.intermediate.dense
    dense.register_forward_hook(
        lambda module, inputs, output: seen.append(
            (output.dtype, threading.current_thread() is threading.main_thread())
        )
    )
    pipe.train_step(step)
    pipe.close()
    assert seen == [(torch.bfloat16, False)] * 4


def test_real_number_of_micro_batches_is_reported(
    process_group: None, tiny_spec_file: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, train_batch_size=6)
    pipe = pipe_engine(partition_of(2, chunks=4), config, tiny_spec_file)
    pipe.close()
    assert pipe.chunks == 3


def test_closing_leaves_no_thread(process_group: None, tiny_spec_file: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    pipe = pipe_engine(partition_of(2), write_config(tmp_path), tiny_spec_file)
    workers = set(threading.enumerate()) - before
    assert workers
    pipe.close()
    pipe.close()
    for worker in workers:
        worker.join(timeout=5)
        assert not worker.is_alive()


class LosesRows(torch.nn.Module):
    """A mask of shape [1,L] in the state: FairScale alone would go on with one row of each chunk's four."""

    def forward(self, *slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state = State(*slots)
        return tuple(state._replace(mask=state.mask[:1]))


def test_failure_in_a_stage_names_the_layer_and_leaves_no_thread(
    process_group: None, tiny_spec_file: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    engine, batches = engine_for(config, tiny_spec_file, tiny_data)
    engine.close()
    before = set(threading.enumerate())
    pipe = pipe_engine(partition_of(2), config, tiny_spec_file)
    workers = set(threading.enumerate()) - before
    next(layer for layer in pipe.layers if layer.name == "text.layer.1").module = LosesRows()
    with pytest.raises(StateError, match=r"out of text\.layer\.1: 'mask' has 1 rows where 4 are expected"):
        pipe.train_step(next(batches))
    pipe.close()
    for worker in workers:
        worker.join(timeout=5)
    assert workers and not any(worker.is_alive() for worker in workers)


def test_signal_ends_a_run_with_stages_and_its_workers(
    tiny_spec_file: Path, tiny_data: Path, tmp_path: Path
) -> None:
    partition = tmp_path / "partition.yaml"
    partition_of(2).save(partition)
    words = [f"--config={write_config(tmp_path)}", f"--model={tiny_spec_file}", f"--data={tiny_data}"]
    words += [f"--partition={partition}", f"--output={tmp_path / 'run'}", "--steps=100000", "--workers=1"]
    command = [sys.executable, str(TRAIN), *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 90
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        run.terminate()
        try:
            run.wait(timeout=60)
        finally:
            run.kill()
    assert len(family) > 1
    assert psutil.wait_procs(family, timeout=20)[1] == []


def test_layers_stay_whole_outside_the_pipe(
    process_group: None, tiny_spec_file: Path, tmp_path: Path
) -> None:
    """FairScale's own keys are ``partitions.0.1.…`` and a pipe can neither be moved nor copied."""
    pipe = pipe_engine(partition_of(3), write_config(tmp_path), tiny_spec_file)
    assert all(key.startswith("partitions.") for key in pipe.pipe.state_dict())
    found = pipe.named_tensors()
    assert found.keys() == named_tensors(build_layers(load_spec(tiny_spec_file), device="meta")).keys()
    twins = [copy.deepcopy(layer).to("cpu") for layer in pipe.layers]
    pipe.close()
    for key, tensor in named_tensors(twins).items():
        torch.testing.assert_close(tensor, found[key], rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 1])
def test_two_ranks_of_a_pipe_through_train_equal_one_process(
    stage: int, tiny_spec_file: Path, tiny_data: Path, tmp_path: Path, free_port: int
) -> None:
    partition = tmp_path / "partition.yaml"
    partition_of(2, chunks=2, recompute=("fusion.layer.*",)).save(partition)
    runs = []
    for ranks in (1, 2):
        config = tmp_path / f"{ranks}.json"
        config.write_text(json.dumps(FP32 | {"zero_optimization": {"stage": stage if ranks == 2 else 0}}))
        pipeline = [f"--partition={partition}", "--pipeline=fairscale"] if ranks == 2 else []
        done = run_train(
            [
                sys.executable,
                "-m",
                "deepspeed.launcher.runner",
                f"--num_gpus={ranks}",
                f"--master_port={free_port}",
            ],
            *(f"--config={config}", f"--model={tiny_spec_file}", f"--data={tiny_data}", *pipeline),
            *(f"--output={tmp_path / f'run{ranks}'}", "--steps=4", "--seed=3", "--no-eval"),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        runs.append(losses_of(tmp_path / f"run{ranks}"))
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-4)
    summary = json.loads((tmp_path / "run2" / "summary.json").read_text())
    assert summary["engine"] == "fairscale" and summary["chunks"] == 2 and summary["recomputed_layers"] == 2


def test_zero_2_with_a_pipeline_is_refused(
    tiny_spec_file: Path, tiny_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from launcher.train import main

    partition = tmp_path / "partition.yaml"
    partition_of(2).save(partition)
    config = write_config(tmp_path, zero_optimization={"stage": 2})
    arguments = [
        f"--config={config}",
        f"--model={tiny_spec_file}",
        f"--data={tiny_data}",
        f"--partition={partition}",
    ]
    assert main(arguments) == 2
    assert "stage 2 cannot be combined with the 2 stages" in capfd.readouterr().err


def test_partition_in_yaml_is_what_the_tests_use() -> None:
    assert yaml.safe_load(partition_of(2).dump_yaml())["stages"][0]["layers"] == ["image.*"]


def test_recomputation_inside_the_pipe_draws_the_dropout_of_the_forward_pass(
    process_group: None, tiny_data: Path, tmp_path: Path
) -> None:
    """All stages on the CPU share one random generator; torch's recomputation puts it back to where it was."""
    spec_file = with_dropout(tmp_path)
    engine, batches = engine_for(write_config(tmp_path), spec_file, tiny_data)
    engine.close()
    towers = [StageSpec(name="towers", layers=("image.*", "text.*"), device=0)]
    rest = StageSpec(name="rest", layers=("fusion.*", "head"), device=1)
    partition = PartitionSpec(
        model="tiny", chunks=8, stages=(*towers, rest), recompute=("text.layer.*", "fusion.layer.*")
    )
    pipe = pipe_engine(partition, write_config(tmp_path), spec_file)
    drawn: Counter[tuple[str, bytes]] = Counter()
    for layer in pipe.layers:
        for name, module in layer.named_modules():
            if layer.recompute and isinstance(module, torch.nn.Dropout) and module.p:
                module.register_forward_hook(
                    lambda _, inputs, output, key=f"{layer.name}/{name}": drawn.update(
                        [(key, (output == 0).numpy().tobytes())]
                    )
                )
    for _ in range(5):
        pipe.train_step(next(batches))
    pipe.close()
    assert len(drawn) == 5 * 8 * len({key for key, _ in drawn}) and set(drawn.values()) == {2}


def with_dropout(folder: Path) -> Path:
    parts = {part: TINY[part] | {"dropout": 0.3, "attention_dropout": 0.3} for part in ("text", "fusion")}
    path = folder / "dropout.yaml"
    path.write_text(yaml.safe_dump(TINY | parts))
    return path
