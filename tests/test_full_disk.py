"""A disk that fills while a run trains: a small tmpfs, real runs of train.py."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_resume import in_turn, losses

from launcher.checkpoint import find
from launcher.growing_file import GrowingFile
from launcher.run_directory import RunDirectory

CONFIG = {"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 0.003}}}
STEPS, FULL, FREE = 7, 3, 5


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if mounted.returncode:
        pytest.skip(f"no tmpfs here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def runs(
    small_disk: Path, tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, tiny_spec_file: Path
) -> dict[str, tuple[int, Path, str]]:
    """Exit code, run directory and log of each."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "c.json").write_text(json.dumps(CONFIG))
    base = [f"--config={folder / 'c.json'}", f"--model={tiny_spec_file}", f"--data={tiny_data}"]
    base += [f"--steps={STEPS}", "--no-eval", "--save-every=1", "--keep=1", "--device=cpu"]
    described = {
        "freed": {"fill_after": FULL, "free_after": FREE},
        "full": {"fill_after": FULL},
        "required": {"fill_after": FULL, "options": ["--save-required"]},
    }
    words = [
        {"arguments": [*base, f"--output={small_disk / name}", *more.pop("options", [])], **more}
        for name, more in described.items()
    ]
    codes = in_turn(folder, 1, words)
    (small_disk / "filler").unlink()
    said = next(folder.glob("*.log")).read_text()
    # standard output first, run by run, then what each says on standard error
    logs = said.split("world size 1:")[1:]
    found = {}
    for name, code, log in zip(described, codes, logs, strict=True):
        checkpoint = find("auto", small_disk / name)
        assert checkpoint is not None
        errors = [
            line for line in said.splitlines() if line.startswith("vlfit train") and f"/{name}/" in line
        ]
        found[name] = (code, checkpoint.path, "\n".join([*log.splitlines(), *errors]))
        partial = list((small_disk / name).rglob("*.partial"))
        assert not partial, partial
    return found


def test_run_goes_on_with_a_warning_and_saves_again_once_there_is_space(runs) -> None:
    code, checkpoint, log = runs["freed"]
    assert code == 0
    for step in range(FULL + 1, FREE + 1):
        assert f"warning: no checkpoint after step {step}: rank 0: 0 MiB free" in log
    assert f"no checkpoint after step {FREE + 1}" not in log
    assert checkpoint.name == f"step-{STEPS:08d}"
    assert list(losses(checkpoint.parent.parent)) == list(range(1, STEPS + 1))  # those that waited, too


def test_last_good_checkpoint_stays_and_the_end_without_a_checkpoint_is_no_success(runs) -> None:
    code, checkpoint, log = runs["full"]
    assert code == 2
    assert checkpoint.name == f"step-{FULL:08d}"
    assert f"warning: no checkpoint after step {STEPS - 1}" in log
    assert f"no checkpoint after step {STEPS}" in log and "free space below" in log


def test_save_required_stops_at_the_first_checkpoint_that_fails(runs) -> None:
    code, checkpoint, log = runs["required"]
    assert code == 2
    assert checkpoint.name == f"step-{FULL:08d}"
    assert "warning: no checkpoint" not in log and f"no checkpoint after step {FULL + 1}" in log


def test_disk_that_fills_in_the_middle_of_a_checkpoint_leaves_nothing_of_it(
    tmp_path: Path, tiny_data: Path, tiny_spec_file: Path
) -> None:
    """A file size limit fails a write half-way, where the space that was free before is not there any more."""
    (tmp_path / "c.json").write_text(json.dumps(CONFIG))
    words = [f"--config={tmp_path / 'c.json'}", f"--model={tiny_spec_file}", f"--data={tiny_data}"]
    words += ["--steps=2", "--no-eval", "--save-every=1", f"--output={tmp_path / 'run'}", "--device=cpu"]
    program = (
        "import resource, sys; from launcher.train import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "warning: no checkpoint after step 1: rank 0:" in done.stdout and "File too large" in done.stdout
    assert "no checkpoint after step 2" in done.stderr
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, shutil.disk_usage(disk).free)
    return filler


def test_lines_that_a_full_disk_refused_are_written_whole_and_in_order(small_disk: Path) -> None:
    file = GrowingFile(small_disk / "lines")
    assert file.write_line("first") is None
    filler = fill(small_disk)
    long = "x" * 5000  # a part of it still fits into the block that the first line began
    assert file.write_line(long) is not None
    assert file.write_line("third") is not None
    filler.unlink()
    assert file.write_line("fourth") is None
    file.close()
    assert (small_disk / "lines").read_text().splitlines() == ["first", long, "third", "fourth"]


def test_full_disk_is_warned_of_once_until_there_is_space(small_disk: Path) -> None:
    directory = RunDirectory.create(small_disk / "metrics", {"config.json": "{}"})

    def write(steps: range) -> list[str]:
        found = [
            directory.write_step(
                {
                    "step": step,
                    "loss": 1.0,
                    "losses": {"itc": 1.0},
                    "peak_allocated_bytes": {},
                    "note": "x" * 999,
                }
            )
            for step in steps
        ]
        return [warning for warning in found if warning]

    assert write(range(1, 3)) == []
    filler = fill(small_disk)
    (warning,) = write(range(3, 30))
    assert warning.endswith("metrics wait, events are left out (No space left on device)")
    filler.unlink()
    assert write(range(30, 40)) == []
    directory.close()
    assert list(losses(small_disk / "metrics")) == list(range(1, 40))
