"""``vlfit launch --hostfile`` through deepspeed's launcher, pdsh and ssh, on two hosts."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import wait_until
from test_launch import STARTER
from two_hosts import TwoHosts, two_hosts  # noqa: F401 (a fixture)

from models.errors import EXIT_INTERRUPTED


class Running:
    """A launch on both hosts, from the test's own namespace."""

    def __init__(self, hosts: TwoHosts, folder: Path, steps: int, *words: str, **environment: str) -> None:
        hostfile = folder / "hosts"
        hostfile.write_text("".join(f"{address} slots=1\n" for address in hosts.addresses.values()))
        self.output, self.log = folder / "run", folder / "log"
        # deepspeed hands variables whose names begin with PYTHON to the hosts, and no others of ours;
        # the program gets the rest by a file of the shared folder
        (folder / "environment.json").write_text(json.dumps(environment))
        arguments = ["--config=c.json", f"--steps={steps}", "--seed=1", f"--output={self.output}", *words]
        launch = [f"--hostfile={hostfile}", f"--master_addr={hosts.addresses['a']}", "--straggler-seconds=3"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", STARTER, *arguments, *launch],
                env=hosts.environment, cwd=folder, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: len(self.metrics()) >= step, 60, f"step {step}", self.log.read_text)

    def metrics(self) -> list[dict]:
        path = self.output / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_no_process(hosts: TwoHosts, *names: str) -> None:
    wait_until(
        lambda: not hosts.processes(*names), 30, "the end of processes", lambda: str(hosts.processes(*names))
    )


def test_two_hosts_train_and_awkward_arguments_arrive(two_hosts, tmp_path):  # noqa: F811
    awkward = ["a b", "$(touch hacked)", "it's", 'say "x"', "new\nline", "%n", "`touch hacked`"]
    words = [f"--allow-change={word}" for word in awkward]
    running = Running(two_hosts, tmp_path, 3, *words)
    assert running.process.wait(90) == 0, running.log.read_text()
    ranks = [json.loads(path.read_text()) for path in sorted((tmp_path / "run/ranks").glob("*.json"))]
    assert [(r["rank"], r["node_rank"], r["world_size"], r["nodes"]) for r in ranks] == [
        (0, 0, 2, 2),
        (1, 1, 2, 2),
    ]
    assert ranks[1]["master_address"] == two_hosts.addresses["a"]
    assert [word for word in ranks[1]["argv"] if word.startswith("--allow")] == words
    assert not list(tmp_path.rglob("hacked"))
    assert [m["step"] for m in running.metrics()] == [1, 2, 3]
    wait_for_no_process(two_hosts)


def test_a_signal_reaches_the_ranks_of_both_hosts(two_hosts, tmp_path):  # noqa: F811
    running = Running(two_hosts, tmp_path, 2000, TEST_STEP_SECONDS="0.1")
    running.wait_for_step(3)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == EXIT_INTERRUPTED, running.log.read_text()
    assert (tmp_path / "run/checkpoint.pt").exists()
    wait_for_no_process(two_hosts)


@pytest.mark.slow  # ssh notices after three unanswered keepalives, 15 s
def test_a_host_that_is_cut_off_ends_the_run_on_the_others(two_hosts, tmp_path):  # noqa: F811
    running = Running(two_hosts, tmp_path, 2000, TEST_STEP_SECONDS="0.1")
    running.wait_for_step(3)
    two_hosts.cut_off("b")
    started = time.monotonic()
    code = running.process.wait(90)
    assert code not in (0, EXIT_INTERRUPTED)
    assert time.monotonic() - started < 80
    assert "1 of 2 hosts ended or cannot be reached" in running.log.read_text()
    wait_for_no_process(two_hosts, "a")
