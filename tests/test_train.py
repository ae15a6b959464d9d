"""The training program, as real processes; and every generated config through a real DeepSpeed engine."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from launcher.config import load_config
from launcher.config.device import DeviceSupport
from launcher.data.batches import FixedBatches
from launcher.data.loader import Loader
from launcher.data.order import DataPosition
from launcher.data.store import Store
from launcher.distributed import Distributed
from launcher.engines.zero import ZeroEngine
from launcher.inputs import Inputs
from launcher.train import main
from models.build import build_layers
from models.layer import Layer, named_tensors, repeated_names, set_recompute
from models.losses import Objectives
from models.spec import load_spec

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))
TRAIN = ROOT / "launcher" / "train.py"
FP32 = {
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
    "zero_optimization": {"stage": 0},
}


def write_config(folder: Path, name: str = "config.json", **changes: object) -> Path:
    path = folder / name
    path.write_text(json.dumps(FP32 | changes))
    return path


def run_train(launcher: list[str], *arguments: str, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        environ.pop(name, None)
    command = [*launcher, str(TRAIN), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environ, cwd=ROOT)


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_spec_file: Path, tiny_data: Path) -> Path:
    """A finished run of five steps under plain python, fp32, one process."""
    folder = tmp_path_factory.mktemp("train")
    config = write_config(folder, activation_checkpointing={})
    done = run_train(
        [sys.executable],
        *(f"--config={config}", f"--model={tiny_spec_file}", f"--data={tiny_data}"),
        *(f"--output={folder / 'run'}", "--steps=5", "--seed=3"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_run_directory_holds_what_the_design_lists(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["steps"] == 5 and summary["samples"] == 80
    assert summary["recomputed_layers"] == 6  # 2 image blocks, 2 text layers, 2 fusion layers
    assert summary["precision_requested"] == summary["precision_used"] == "fp32"
    assert summary["engine"] == "zero" and summary["world_size"] == 1
    assert {"image_to_text_r1", "text_to_image_r1", "image_to_text_reranked_r10"} <= summary["metrics"].keys()
    assert summary["metrics"]["candidates"] == 16
    assert summary["peak_allocated_bytes"]["cpu"] > 0 and summary["peak_rss_bytes"] > 0
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert set(lines[0]["losses"]) == {"itc", "itm", "mlm"}
    assert list(trained.glob("events.out.tfevents.*"))
    assert (trained / "plan" / "config.json").is_file() and (trained / "plan" / "model.yaml").is_file()


def test_measured_peak_covers_at_least_weights_and_optimizer(trained: Path) -> None:
    spec = load_spec(trained / "plan" / "model.yaml")
    count = sum(tensor.numel() for tensor in named_tensors(build_layers(spec, device="meta")).values())
    summary = json.loads((trained / "summary.json").read_text())
    # fp32 weights, gradients and two moments of Adam
    assert summary["peak_allocated_bytes"]["cpu"] > 16 * count


def test_predicted_peak_stands_beside_the_measured_one(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    measured, predicted = summary["peak_allocated_bytes"], summary["predicted_peak_bytes"]
    assert predicted.keys() == measured.keys()
    assert predicted["cpu"] == pytest.approx(measured["cpu"], rel=0.04)


def test_two_ranks_of_half_the_batch_give_the_same_losses(
    trained: Path, tmp_path: Path, tiny_spec_file: Path, tiny_data: Path, free_port: int
) -> None:
    config = write_config(tmp_path)
    done = run_train(
        [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2", f"--master_port={free_port}"],
        *(f"--config={config}", f"--model={tiny_spec_file}", f"--data={tiny_data}"),
        *(f"--output={tmp_path / 'run'}", "--steps=5", "--seed=3"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2
    np.testing.assert_allclose(losses_of(tmp_path / "run"), losses_of(trained), rtol=1e-4)


def test_recomputation_does_not_change_the_losses(
    trained: Path, process_group: None, tiny_data: Path, tmp_path: Path
) -> None:
    """The run above recomputed six layers; this one recomputes none."""
    engine, batches = engine_for(write_config(tmp_path), trained / "plan" / "model.yaml", tiny_data, seed=3)
    found = [engine.train_step(next(batches)).loss for _ in range(5)]
    engine.close()
    np.testing.assert_allclose(found, losses_of(trained), rtol=1e-5)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_generated_config_trains_and_reaches_every_parameter(
    path: Path, process_group: None, tiny_spec_file: Path, tiny_data: Path
) -> None:
    engine, batches = engine_for(path, tiny_spec_file, tiny_data, total_steps=3)
    before = engine.named_tensors()
    results = [engine.train_step(next(batches)) for _ in range(3)]
    after = engine.named_tensors()
    engine.close()
    assert all(np.isfinite(result.loss) for result in results)
    assert results[-1].loss < results[0].loss * 1.05
    # A softmax does not change when all its keys shift alike: their bias has no gradient in exact arithmetic.
    unmoved = [key for key in before if torch.equal(before[key], after[key]) and not key.endswith("key.bias")]
    assert unmoved == []


def test_activation_checkpointing_runs_each_layer_twice_a_step(
    process_group: None, tiny_spec_file: Path, tiny_data: Path
) -> None:
    calls: dict[str, int] = {}
    engine, batches = engine_for(
        ROOT / "ds_configs" / "bf16_ckpt.json", tiny_spec_file, tiny_data, total_steps=2
    )
    for layer in engine.layers:
        layer.module.register_forward_pre_hook(
            lambda module, inputs, name=layer.name: calls.update({name: calls.get(name, 0) + 1})
        )
    engine.train_step(next(batches))
    engine.close()
    repeated = repeated_names(engine.layers)
    assert {name: calls[name] for name in repeated} == dict.fromkeys(repeated, 2)
    assert {calls[layer.name] for layer in engine.layers if layer.name not in repeated} == {1}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_by_layer_name_survive_saving_and_loading(
    stage: int, process_group: None, tiny_spec_file: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, bf16={"enabled": True}, zero_optimization={"stage": stage})
    first, batches = engine_for(config, tiny_spec_file, tiny_data, seed=1)
    first.train_step(next(batches))
    saved = first.named_tensors()
    first.close()
    second, _ = engine_for(config, tiny_spec_file, tiny_data, seed=2)
    second.load_named_tensors(saved)
    loaded = second.named_tensors()
    second.close()
    assert saved.keys() == loaded.keys()
    for key, value in saved.items():
        torch.testing.assert_close(loaded[key], value, rtol=0, atol=0)


def test_batches_by_memory_weigh_rows_equally_over_two_ranks(
    tmp_path: Path, tiny_spec_file: Path, tiny_data: Path, free_port: int
) -> None:
    """One rank with two micro-batches and two ranks with one each see the same rows, cut by memory."""
    found = []
    for ranks in (1, 2):
        config = write_config(
            tmp_path, f"{ranks}.json", train_micro_batch_size_per_gpu=8, train_batch_size=16
        )
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", f"--num_gpus={ranks}"]
        done = run_train(
            [*launcher, f"--master_port={free_port}"],
            *(
                f"--config={config}",
                f"--model={without_itc(tmp_path, tiny_spec_file)}",
                f"--data={tiny_data}",
            ),
            *(
                f"--output={tmp_path / str(ranks)}",
                "--steps=4",
                "--batch-memory=auto",
                "--cache=node",
                "--no-eval",
            ),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(losses_of(tmp_path / str(ranks)))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)


def without_itc(folder: Path, spec_file: Path) -> Path:
    """ITC looks at the rows of one micro-batch over all ranks: two micro-batches of one rank are apart."""
    spec = yaml.safe_load(spec_file.read_text())
    del spec["objectives"]["itc"]
    path = folder / "no-itc.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


BAD = {
    "missing config": (["--config=nowhere.json"], 2, "nowhere.json"),
    "unknown model": (["--model=no_such_model"], 2, "no_such_model"),
    "missing data": (["--data=nowhere"], 3, "nowhere"),
    "broken json": (["--config={broken}"], 2, "broken.json"),
    "unknown key": (["--config={unknown}"], 2, "train_batch_sizes"),
    "cuda absent": (["--device=cuda"], 2, "--device cuda"),
    "pipeline without partition": (["--pipeline=fairscale"], 2, "--partition"),
    "text beyond positions": (["--model={long}"], 2, "position table"),
    "heads do not divide": (["--model={heads}"], 2, "do not divide"),
    "vocabulary too small": (["--model={vocabulary}"], 2, "vocab_size"),
    "other image size": (["--model={size}"], 2, "--image-size"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_the_right_exit_code(
    case: str, tmp_path: Path, tiny_spec_file: Path, tiny_data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tiny_spec_file.read_text()
    files = {
        "broken": write_config(tmp_path, "broken.json"),
        "unknown": write_config(tmp_path, "unknown.json", train_batch_sizes=4),
    }
    files["broken"].write_text('{"train_batch_size": }')
    for name, old, new in (
        ("long", "length: 12", "length: 64"),
        ("heads", "heads: 2", "heads: 3"),
        ("vocabulary", "vocab_size: 128", "vocab_size: 20"),
        ("size", "size: 32", "size: 64"),
    ):
        assert old in text
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(text.replace(old, new))
    good = {
        "--config": str(write_config(tmp_path)),
        "--model": str(tiny_spec_file),
        "--data": str(tiny_data),
        "--output": str(tmp_path / "out"),
        "--steps": "2",
    }
    arguments, code, words = BAD[case]
    for argument in arguments:
        key, value = argument.split("=", 1)
        good[key] = value.format(**files)
    assert main([f"{key}={value}" for key, value in good.items()]) == code
    lines = [line for line in capfd.readouterr().err.splitlines() if "vlfit train" in line]
    assert len(lines) == 1 and words in lines[0]
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_zero_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([f"--config={write_config(tmp_path)}", "--steps=0"])
    assert stopped.value.code == 2


def test_directory_with_another_plan_is_refused(
    trained: Path, tmp_path: Path, tiny_spec_file: Path, tiny_data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, gradient_clipping=0.5)
    before = (trained / "metrics.jsonl").read_text()
    assert (
        main(
            [f"--config={config}", f"--model={tiny_spec_file}", f"--data={tiny_data}", f"--output={trained}"]
        )
        == 2
    )
    assert "another plan (config.json differs)" in capfd.readouterr().err
    assert (trained / "metrics.jsonl").read_text() == before


def test_help_is_instant_because_it_imports_no_torch() -> None:
    code = (
        "import sys, launcher.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, 'pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "False False"


def engine_for(
    config: Path, spec_file: Path, data: Path, seed: int = 0, total_steps: int | None = None
) -> tuple[ZeroEngine, "object"]:
    """An engine in this process and an endless iterator over its steps' micro-batches."""
    spec, store, device = load_spec(spec_file), Store.open(data / "train"), torch.device("cpu")
    resolved = load_config(config).resolve(
        world_size=1, device=DeviceSupport.detect(), total_steps=total_steps
    )
    torch.manual_seed(seed)
    layers: list[Layer] = build_layers(spec, seed=seed)
    if resolved.recompute:
        set_recompute(layers, repeated_names(layers))
    distributed = Distributed(0, 0, 1, 1, 0, 1, "127.0.0.1", 0, "python")
    engine = ZeroEngine(layers, resolved, Objectives(spec), distributed, device)
    plan = FixedBatches(len(store), resolved.micro_batch_size, resolved.accumulation_steps, spec.text.length)
    inputs = Inputs.create(spec, store.manifest, seed, device)
    stream = iter(Loader(store, plan, start=DataPosition(seed=seed)))
    return engine, iter(lambda: [inputs(next(stream)) for _ in range(resolved.accumulation_steps)], None)


def test_true_fp16_scales_the_loss_and_skipped_steps_do_not_move_the_schedule(
    process_group: None,
    tiny_spec_file: Path,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """fp16 arithmetic on the CPU, which DeepSpeed refuses unless its accelerator says otherwise: slow but real."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": 40, "warmup_num_steps": 4}}
    # 2^24 overflows fp16's 65504 for certain; each overflow halves it (hysteresis 1).
    fp16 = {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 24,
        "hysteresis": 1,
        "loss_scale_window": 1000,
    }
    engine, batches = engine_for(
        write_config(tmp_path, fp16=fp16, scheduler=scheduler), tiny_spec_file, tiny_data, total_steps=40
    )
    assert engine.config.precision_used == "fp16"
    assert {parameter.dtype for parameter in engine.deepspeed.module.parameters()} == {torch.float16}
    results = [engine.train_step(next(batches)) for _ in range(16)]
    engine.close()
    skipped = [result.overflow for result in results]
    engine.close()
    assert skipped[0] and not skipped[-1]
    assert all(np.isfinite(result.loss) for result in results)
    scales = [result.loss_scale for result in results]
    assert scales[-1] < 2**24 and scales == sorted(scales, reverse=True)
    rates = [result.lr for result in results]
    moved = [after != before for before, after in pairwise(rates)]
    assert not any(change for change, overflow in zip(moved, skipped, strict=False) if overflow)
    # The schedule is at 0 before its first step and after it.
    assert sum(moved) == skipped[:-1].count(False) - 1


def test_batch_of_one_trains_without_negatives_and_counts_them(
    process_group: None, tiny_spec_file: Path, tiny_data: Path, tmp_path: Path
) -> None:
    engine, batches = engine_for(write_config(tmp_path, train_batch_size=1), tiny_spec_file, tiny_data)
    result = engine.train_step(next(batches))
    engine.close()
    assert np.isfinite(result.loss) and result.losses["itc"] == result.losses["itm"] == 0
    assert result.skipped_rows == {"itc": 1, "itm": 1}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_takes_the_step_that_fp32_takes(
    stage: int,
    process_group: None,
    tiny_spec_file: Path,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain SGD moves weights by the gradient itself, so a loss scale that is applied once but removed twice, or
    the reverse, shows (DeepSpeed 0.19.8 does not apply it at stage 0)."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    common = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_allow_untested_optimizer": True}
    expected_norm, moved = result_norm(tiny_spec_file, tiny_data), []
    for name, precision in (
        ("fp32", {"zero_optimization": {"stage": 0}}),
        (
            "fp16",
            {"zero_optimization": {"stage": stage}, "fp16": {"enabled": True, "initial_scale_power": 8}},
        ),
    ):
        config = write_config(tmp_path, f"{name}.json", **common, **precision)
        engine, batches = engine_for(config, tiny_spec_file, tiny_data)
        before = engine.named_tensors()
        result = engine.train_step(next(batches))
        after = engine.named_tensors()
        engine.close()
        assert not result.overflow
        if name == "fp16":
            assert result.loss_scale == 2**8
            assert result.grad_norm == pytest.approx(expected_norm, rel=0.05)
        change = torch.cat([(after[key] - before[key]).flatten() for key in sorted(before)])
        moved.append(change)
    # the gradient is clipped to norm 1, and the rate is 1
    assert moved[0].norm() == pytest.approx(1, rel=0.01)
    assert moved[1].norm() == pytest.approx(float(moved[0].norm()), rel=0.05)
    assert torch.nn.functional.cosine_similarity(*moved, dim=0) > 0.99


def result_norm(spec_file: Path, data: Path) -> float:
    """The norm of the gradient of the first step, by autograd alone."""
    spec, store = load_spec(spec_file), Store.open(data / "train")
    torch.manual_seed(0)
    layers = build_layers(spec)
    inputs = Inputs.create(spec, store.manifest, 0, torch.device("cpu"))
    plan = FixedBatches(len(store), 16, 1, spec.text.length)
    batch = inputs(next(iter(Loader(store, plan, start=DataPosition(seed=0)))))
    network = torch.nn.Sequential(*layers)
    Objectives(spec)(network(batch.state), batch.targets).total.backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in network.parameters() if p.grad is not None]))
