"""Runs that are interrupted by a signal and go on: real processes of train.py, one and two ranks, every engine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import TINY

from launcher.checkpoint import find
from launcher.train import main
from models.errors import UserError

ROOT = Path(__file__).parent.parent
STEPS, STOP = 6, 3
DROPOUT = TINY | {part: TINY[part] | {"dropout": 0.1} for part in ("text", "fusion")}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
CONFIG = {
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
    "scheduler": SCHEDULE,
}
STAGES = {
    "model": "tiny",
    "chunks": 1,
    "stages": [
        {"name": "towers", "layers": ["image.*", "text.*"], "device": 0},
        {"name": "fusion", "layers": ["fusion.*", "head"], "device": 1},
    ],
}

# name: (ranks, ZeRO stage, pipeline, spec, largest relative difference after the resume, more of the config)
CASES = {
    "zero-0": (1, 0, None, "dropout", 0.0, {}),
    "zero-2": (1, 2, None, "dropout", 0.0, {}),
    "bf16": (1, 1, None, "tiny", 1e-3, {"bf16": {"enabled": True}}),
    "bf16-stage-0": (1, 0, None, "tiny", 1e-3, {"bf16": {"enabled": True}}),
    "zero-1 of 2": (2, 1, None, "dropout", 0.0, {}),
    "zero-3 of 2": (2, 3, None, "dropout", 0.0, {}),
    # its order of adding up gradients differs from process to process
    "fairscale of 2": (2, 1, "fairscale", "tiny", 1e-5, {}),
    "deepspeed of 2": (2, 1, "deepspeed", "tiny", 0.0, {}),
}
# Checkpoints that another engine or world goes on from: (from, to)
MOVES = [("zero-3 of 2", "zero-0"), ("fairscale of 2", "tiny-zero-2"), ("deepspeed of 2", "tiny-fairscale")]
TARGETS = {
    "zero-0": (0, None, "dropout"),
    "tiny-zero-2": (2, None, "tiny"),
    "tiny-fairscale": (0, "fairscale", "tiny"),
}


def arguments(
    folder: Path, name: str, zero: int, pipeline: str | None, spec: str, **more: object
) -> list[str]:
    config = folder / f"{name}.json"
    config.write_text(json.dumps(CONFIG | {"zero_optimization": {"stage": zero}} | more))
    found = [f"--config={config}", f"--model={folder / spec}.yaml", f"--data={folder / 'data'}"]
    if pipeline:
        found += [f"--pipeline={pipeline}", f"--partition={folder / 'stages.yaml'}"]
    return [*found, f"--steps={STEPS}", "--no-eval"]


def in_turn(folder: Path, ranks: int, runs: list[dict]) -> list[int]:
    """Run train.py for each; gives rank 0's exit codes."""
    source = folder / f"runs{ranks}-{len(list(folder.glob('runs*')))}.json"
    source.write_text(json.dumps(runs))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = (
        [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    )
    command = [sys.executable, *launcher, str(ROOT / "tests" / "train_in_turn.py"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environ, cwd=ROOT)
    codes = source.with_suffix(".codes.0.json")
    assert codes.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    (folder / f"{source.stem}.log").write_text(done.stdout + done.stderr)
    return json.loads(codes.read_text())


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines), "a step twice"
    return {line["step"]: line["loss"] for line in lines}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """All runs: each case whole, then stopped by a signal to its last rank, then resumed."""
    path = tmp_path_factory.mktemp("resume")
    (path / "data").symlink_to(tiny_data)
    (path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    (path / "dropout.yaml").write_text(yaml.safe_dump(DROPOUT))
    (path / "stages.yaml").write_text(yaml.safe_dump(STAGES))
    for ranks in (2, 1):
        runs, expected = [], []
        for name, (world, zero, pipeline, spec, _, more) in CASES.items():
            if world == ranks:
                base = arguments(path, name, zero, pipeline, spec, **more)
                stopped = [*base, f"--output={path / name}"]
                runs += [
                    {"arguments": [*base, f"--output={path / name}.whole", "--save-every=none"]},
                    {"arguments": stopped, "signal_after": STOP},
                    {"arguments": [*stopped, "--resume=auto"]},
                ]
                expected += [0, 75, 0]
        for source, target in MOVES if ranks == 1 else ():
            base = arguments(path, target, *TARGETS[target])
            moved = f"--resume={path / source / 'checkpoints' / f'step-{STOP:08d}'}"
            runs.append({"arguments": [*base, moved, f"--output={path / target}.moved"]})
            expected.append(0)
        assert in_turn(path, ranks, runs) == expected
    return path


@pytest.mark.parametrize("name", CASES)
def test_resumed_losses_equal_those_of_the_uninterrupted_run(name: str, folder: Path) -> None:
    whole, resumed = losses(folder / f"{name}.whole"), losses(folder / name)
    assert list(resumed) == list(range(1, STEPS + 1))
    tolerance = CASES[name][4]
    np.testing.assert_allclose(list(resumed.values()), list(whole.values()), rtol=tolerance, atol=0)


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_another_engine_and_world_goes_on_from_a_checkpoint(source: str, target: str, folder: Path) -> None:
    moved, whole = losses(folder / f"{target}.moved"), losses(folder / f"{source}.whole")
    assert list(moved) == list(range(STOP + 1, STEPS + 1))
    # dropout draws other numbers in another world
    tolerance = 0.1 if CASES[source][3] == "dropout" else 1e-3
    for step, loss in moved.items():
        assert loss == pytest.approx(whole[step], rel=tolerance)


def test_summary_of_a_resumed_run_counts_all_of_it(folder: Path) -> None:
    whole = json.loads((folder / "zero-0.whole" / "summary.json").read_text())
    resumed = json.loads((folder / "zero-0" / "summary.json").read_text())
    for key in ("steps", "epoch", "samples", "loss_first", "loss_last", "skipped_steps"):
        assert resumed[key] == whole[key], key


# What differs, and the key that the message names
CHANGES = {
    "learning rate": ({"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}, [], "optimizer.params.lr"),
    "batch": ({"train_batch_size": 8}, [], "global_batch_size: 16 → 8"),
    "seed": ({}, ["--seed=5"], "seed: 0 → 5"),
    "steps": ({}, ["--steps=9"], "steps: 6 → 9"),
    "model": ({}, ["--model={tiny}"], "model.text.dropout: 0.1 → 0.0"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_another_model_or_schedule_is_refused_with_the_difference(
    case: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more, options, words = CHANGES[case]
    base = arguments(folder, f"changed-{case}", 0, None, "dropout", **more)
    options = [option.format(tiny=folder / "tiny.yaml") for option in options]
    assert main([*base, *options, f"--output={folder / 'zero-0'}", "--resume=auto"]) == 2
    error = capfd.readouterr().err
    assert words in error and "--allow-change" in error
    assert len(losses(folder / "zero-0")) == STEPS


def test_place_without_checkpoint_is_refused_instead_of_starting_afresh(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = arguments(folder, "afresh", 0, None, "dropout")
    for resume, words in (
        (f"--resume={tmp_path}", "holds no checkpoint"),
        (f"--resume={tmp_path / 'nowhere'}", "holds no checkpoint"),
    ):
        assert main([*base, resume, f"--output={tmp_path / 'run'}"]) == 2
        assert words in capfd.readouterr().err
    assert main([*base, "--resume=auto"]) == 2
    assert "--output" in capfd.readouterr().err


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": lambda path: path.write_bytes(
        path.read_bytes()[:-9] + bytes([path.read_bytes()[-9] ^ 1]) + path.read_bytes()[-8:]
    ),
    "deleted": lambda path: path.unlink(),
}
# name: files of the optimizer's moments and of random numbers
SHARES = {
    "zero-0": (1, 1),
    "zero-1 of 2": (2, 2),
    "zero-3 of 2": (2, 2),
    "fairscale of 2": (2, 2),
    "deepspeed of 2": (2, 2),
}


@pytest.mark.parametrize("damaged", DAMAGE)
@pytest.mark.parametrize("name", SHARES)
def test_damaged_checkpoint_is_passed_over_and_the_previous_one_used(
    name: str, damaged: str, folder: Path, tmp_path: Path
) -> None:
    newest = folder / name / "checkpoints" / f"step-{STEPS:08d}"
    files = sorted(path.name for path in newest.iterdir())
    moments, random = SHARES[name]
    assert files == sorted(
        ["checksums.json", "model.safetensors", "state.json"]
        + [f"optimizer-{rank:05d}.safetensors" for rank in range(moments)]
        + [f"random-{rank:05d}.safetensors" for rank in range(random)]
    )
    for file in files:
        run = tmp_path / file
        shutil.copytree(folder / name / "checkpoints", run / "checkpoints")
        DAMAGE[damaged](run / "checkpoints" / newest.name / file)
        found = find("auto", run)
        assert found is not None and found.path.name == f"step-{STOP:08d}", file
        (reason,) = found.passed_over
        assert newest.name in reason and file in reason
        # asked for by its own path, it is refused and not replaced silently
        with pytest.raises(UserError, match="--resume"):
            find(str(run / "checkpoints" / newest.name), None)


def test_message_of_a_resumed_run_says_which_checkpoint_was_passed_over_and_why(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "zero-0", tmp_path / "run")
    DAMAGE["truncated"](
        tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}" / "optimizer-00000.safetensors"
    )
    base = arguments(folder, "zero-0", 0, None, "dropout")
    assert in_turn(folder, 1, [{"arguments": [*base, f"--output={tmp_path / 'run'}", "--resume=auto"]}]) == [
        0
    ]
    log = max(folder.glob("*.log"), key=lambda path: path.stat().st_mtime).read_text()
    assert f"passed over step-{STEPS:08d}: optimizer-00000.safetensors has" in log
    assert f"resuming after step {STOP} from" in log
    assert losses(tmp_path / "run") == losses(folder / "zero-0.whole")


def test_nothing_is_written_with_group_or_world_write(folder: Path) -> None:
    paths = list((folder / "zero-0").rglob("*"))
    assert len(paths) > 10 and not any(path.stat().st_mode & 0o022 for path in paths)
