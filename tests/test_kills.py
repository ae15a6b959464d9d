"""kill -9 of a rank, of a data worker and of the launcher, while train.py trains on two ranks of ``vlfit launch``."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from slurm_cluster import is_alive, wait_until
from test_launch import PROGRAM, STARTER
from test_resume import CONFIG

from launcher.checkpoint import find
from models.errors import EXIT_INTERRUPTED

TRAIN = Path(__file__).parents[1] / "launcher" / "train.py"
SECONDS = 30
"""Within which all is down."""


class Run:
    """A run that would go on for hours, all of its processes, and what it said."""

    def __init__(self, folder: Path, spec: Path, data: Path) -> None:
        (folder / "c.json").write_text(json.dumps(CONFIG | {"zero_optimization": {"stage": 2}}))
        self.run, self.log = folder / "run", folder / "log"
        words = [f"--config={folder / 'c.json'}", f"--model={spec}", f"--data={data}", f"--output={self.run}"]
        words += ["--steps=100000", "--no-eval", "--save-every=5", "--keep=2", "--workers=1", "--device=cpu"]
        starter = STARTER.replace(str(PROGRAM), str(TRAIN))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", starter, *words, "--processes=2"],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._trains, 90, "steps and a checkpoint", self.log.read_text)
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def _trains(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return (self.run / "checkpoints" / "latest").exists()

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank: of those with its variables, the one that started the others."""
        (found,) = [
            process
            for process in self.family
            if process.environ().get("RANK") == str(number) and "RANK" not in process.parent().environ()
        ]
        return found

    def alive(self) -> list[psutil.Process]:
        return [process for process in self.family if process.is_running() and is_alive(process.pid)]


@pytest.mark.parametrize("whom", ["rank", "data worker", "launcher"])
def test_all_is_down_within_30_seconds_and_the_message_names_the_first(
    whom, tmp_path, tiny_spec_file, tiny_data
):
    run = Run(tmp_path, tiny_spec_file, tiny_data)
    rank = run.rank(1)
    if whom == "rank":
        rank.kill()
    elif whom == "launcher":
        run.process.kill()
    else:
        # the worker is the fork server's child
        next(p for p in rank.children(recursive=True) if p.parent().pid != rank.pid).kill()
    try:
        code = run.process.wait(SECONDS)
        log = run.log.read_text()
        wait_until(lambda: not run.alive(), SECONDS, "the end of every process", lambda: str(run.alive()))
        if whom == "rank":
            assert code == 128 + signal.SIGKILL
            assert f"rank 1 (process {rank.pid}) ended first, killed by SIGKILL" in log
        elif whom == "data worker":
            assert code == 2
            assert "vlfit train (rank 1): a data worker was killed by SIGKILL" in log
            assert f"rank 1 (process {rank.pid}) ended first" in log
        else:
            assert "SIGTERM: saving after step" in run.log.read_text()
    finally:
        for process in run.alive():
            process.kill()
        run.process.kill()
    found = find("auto", run.run)
    assert found is not None and not found.passed_over
    assert code != EXIT_INTERRUPTED
