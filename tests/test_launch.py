"""``vlfit launch``: the command of each plan, and that nothing outlives it, whoever is killed."""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from slurm_cluster import is_alive, wait_until

from launcher import family
from launcher.commands import launch as command
from launcher.hostfile import read_hostfile
from launcher.launch import plan_launch
from models.errors import EXIT_INTERRUPTED, UserError

PROGRAM = Path(__file__).with_name("rank_program.py")
STARTER = f"""
import argparse, sys
from launcher.commands.launch import add_arguments
from launcher.launch import run_launch
parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(run_launch(parser.parse_args(), program={str(PROGRAM)!r}))
"""


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["--config=c.json", *words])


def planned(*words: str, environ: dict[str, str] | None = None) -> list[str]:
    return list(plan_launch(parse(*words), environ or {}, "id", 29500, "launcher/train.py").command[1:])


@pytest.fixture
def partition(tmp_path: Path) -> str:
    path = tmp_path / "two.yaml"
    path.write_text("model: demo\nstages: [{name: a, layers: [a]}, {name: b, layers: [b]}]\n")
    return str(path)


def test_command_of_each_engine(partition):
    deepspeed = ["-m", "deepspeed.launcher.runner"]
    rest = ["--master_port=29500", "launcher/train.py", "--config=c.json"]
    assert planned("--gpus=4") == [*deepspeed, "--num_gpus=4", *rest]
    # one pipeline group per process: four GPUs, two stages, two processes
    assert planned("--gpus=4", "--partition", partition) == [
        *deepspeed, "--num_gpus=2", *rest, f"--partition={partition}"
    ]  # fmt: skip
    # a process per stage: four GPUs, two stages, two replicas
    assert planned("--gpus=4", "--partition", partition, "--pipeline=deepspeed") == [
        *deepspeed, "--num_gpus=4", *rest, f"--partition={partition}", "--pipeline=deepspeed"
    ]  # fmt: skip
    # nobody says how many GPUs there are: one replica
    assert planned("--partition", partition)[2] == "--num_gpus=1"
    assert planned("--partition", partition, "--pipeline=deepspeed")[2] == "--num_gpus=2"
    with pytest.raises(UserError, match="2 stages of the deepspeed pipeline do not divide 3 processes"):
        planned("--gpus=3", "--partition", partition, "--pipeline=deepspeed")
    assert planned("--gpus=2", "--launcher=torchrun") == [
        "-m", "launcher.torchrun", "--nproc-per-node=2", "--standalone",
        "launcher/train.py", "--config=c.json",
    ]  # fmt: skip


def test_visible_devices_are_kept(partition):
    assert planned(environ={"CUDA_VISIBLE_DEVICES": "2,3"})[2] == "--include=localhost:2,3"
    grouped = plan_launch(
        parse("--partition", partition), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "id", 1, "launcher/train.py"
    )
    assert "--include=localhost:4,5" in grouped.command
    assert grouped.environment == (("VLFIT_VISIBLE_DEVICES", "4,5,6,7"),)
    # numbers are all that deepspeed's launcher can parse
    assert "launcher.torchrun" in planned(environ={"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"})
    with pytest.raises(UserError, match="numbers only"):
        planned("--launcher=deepspeed", environ={"CUDA_VISIBLE_DEVICES": "GPU-1"})


def test_launcher_options_never_end_up_after_the_script(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb slots=2\n")
    words = planned(
        "--hostfile", str(hostfile), "--no_ssh", "--node_rank=1", "--master_addr=10.0.0.1", "--steps=3"
    )  # fmt: skip
    script = words.index("launcher/train.py")
    assert words[script + 1 :] == ["--config=c.json", "--steps=3"]
    assert {"--no_ssh", "--node_rank=1", "--master_addr=10.0.0.1"} <= set(words[:script])


def test_what_a_remote_shell_would_take_apart_is_encoded(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb slots=2\n")
    plain = planned("--hostfile", str(hostfile), "--output=runs/x")
    assert plain[-3:] == ["--config=c.json", "--output=runs/x", "--launch-id=id"]
    encoded = planned("--hostfile", str(hostfile), "--output=$(touch x) %n")
    assert not any("touch" in word for word in encoded)
    assert encoded[-2].startswith("--arguments-base64=")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=2\nb\n", "line 2: 'b'"),
        ("a slots=0\n", "line 1"),
        ("a slots=2 b slots=2\n", "line 1"),
        ("a slots=2\na slots=4\n", "line 2: host a is listed twice"),
        ("# nothing\n", "no host"),
        ("$(touch x) slots=1", "line 1"),
        (None, "cannot be read"),
    ],
)
def test_hostfile_that_cannot_work_is_refused(tmp_path, text, said):
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as refused:
        planned("--hostfile", str(path))
    assert said in str(refused.value)
    assert str(path) in str(refused.value)


def test_hostfile_keeps_its_order_and_ignores_comments(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# cluster\nb slots=4  # the fast one\n\n10.0.0.1 slots=2\n")
    assert list(read_hostfile(path).items()) == [("b", 4), ("10.0.0.1", 2)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes=2"], "needs a --hostfile"),
        (["--no_ssh"], "needs --hostfile"),
        (["--launcher=torchrun", "--nodes=2"], "--node_rank None"),
        (["--launcher=torchrun", "--nodes=2", "--node_rank=0", "--master_addr=localhost"], "localhost"),
    ],
)  # fmt: skip
def test_options_that_would_train_on_one_node_silently_are_refused(words, said):
    with pytest.raises(UserError, match=said):
        planned(*words)


class Running:
    """A ``vlfit launch`` of two slow ranks, each with a child."""

    def __init__(self, folder: Path, launcher: str) -> None:
        self.run = folder / "run"
        self.log = folder / "log"
        words = [
            "--config=c.json",
            "--steps=2000",
            f"--output={self.run}",
            f"--launcher={launcher}",
            "--gpus=2",
        ]
        environ = os.environ | {"TEST_STEP_SECONDS": "0.1", "TEST_CHILD": "1", "TEST_NO_TORCH": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", STARTER, *words],
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.family: list[psutil.Process] = []

    def wait_for_ranks(self) -> None:
        both = [self.run / "ranks" / f"{rank}.json" for rank in (0, 1)]
        wait_until(
            lambda: all(p.exists() and p.stat().st_size for p in both), 60, "ranks", self.log.read_text
        )
        time.sleep(0.2)
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        self.ranks = [json.loads(path.read_text()) for path in both]

    def alive(self) -> list[psutil.Process]:
        return [process for process in self.family if process.is_running() and is_alive(process.pid)]

    def pid_of(self, whom: str) -> int:
        """Process id of the supervisor, of what it started, of the ranks' parent, or of rank 1."""
        rank = psutil.Process(self.ranks[1]["pid"])
        parent = rank.parent()
        return {
            "vlfit": self.process.pid,
            "runner": self._runner(parent),
            "launcher": parent.pid,
            "rank": rank.pid,
        }[whom]

    def _runner(self, parent: psutil.Process) -> int:
        return parent.ppid() if parent.ppid() != self.process.pid else parent.pid

    def wait_for_end(self) -> None:
        wait_until(lambda: not self.alive(), 30, "the end of every process", lambda: str(self.alive()))

    def end(self) -> None:
        for process in self.alive():
            process.kill()
        self.process.kill()
        self.process.wait()


SAVED, FAILED = {EXIT_INTERRUPTED}, set(range(1, 256))
DEATHS = {
    # "launcher" is the ranks' parent; deepspeed's "runner" is its parent
    "vlfit": [
        ("deepspeed", signal.SIGTERM, SAVED),
        ("deepspeed", signal.SIGINT, SAVED),
        ("deepspeed", signal.SIGUSR1, SAVED),
        ("deepspeed", signal.SIGKILL, {-signal.SIGKILL}),
        ("torchrun", signal.SIGTERM, SAVED),
    ],
    "runner": [("deepspeed", signal.SIGTERM, SAVED), ("deepspeed", signal.SIGKILL, SAVED)],
    "launcher": [
        ("deepspeed", signal.SIGTERM, FAILED),
        ("deepspeed", signal.SIGINT, FAILED),
        ("deepspeed", signal.SIGUSR1, SAVED),
        ("deepspeed", signal.SIGKILL, SAVED),
    ],
    "rank": [
        ("deepspeed", signal.SIGTERM, SAVED),
        ("deepspeed", signal.SIGUSR1, SAVED),
        ("deepspeed", signal.SIGKILL, {128 + signal.SIGKILL}),
        ("torchrun", signal.SIGKILL, {128 + signal.SIGKILL}),
    ],
}


@pytest.mark.parametrize("whom", DEATHS)
def test_no_process_outlives_a_launch_and_no_death_passes_as_success(tmp_path, whom):
    launches: list[Running] = []
    try:
        for index, (launcher, _, _) in enumerate(DEATHS[whom]):  # side by side: they mostly wait
            (tmp_path / str(index)).mkdir()
            launches.append(Running(tmp_path / str(index), launcher))
        for running, (_, number, _) in zip(launches, DEATHS[whom], strict=True):
            running.wait_for_ranks()
            os.kill(running.pid_of(whom), number)
        for running, (launcher, number, codes) in zip(launches, DEATHS[whom], strict=True):
            log = running.log.read_text
            assert running.process.wait(60) in codes, f"{launcher} {number!r}\n{log()}"
            if codes == SAVED or whom == "vlfit":
                wait_until((running.run / "checkpoint.pt").exists, 30, "a checkpoint", log)
            running.wait_for_end()
    finally:
        for running in launches:
            running.end()


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_run_that_ends_well_gives_0_and_awkward_arguments_arrive(tmp_path, launcher):
    awkward = ["a b", "$(touch hacked)", "it's", 'say "x"', "new\nline", "%n"]
    words = ["--config=c.json", "--steps=1", *(f"--allow-change={word}" for word in awkward)]
    where = [f"--output={tmp_path / 'r u n'}"]
    started = subprocess.run(
        [sys.executable, "-c", STARTER, *words, *where, f"--launcher={launcher}", "--processes=2"],
        env=os.environ | {"TEST_NO_TORCH": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert started.returncode == 0, started.stderr
    described = [
        json.loads(path.read_text()) for path in sorted((tmp_path / "r u n" / "ranks").glob("*.json"))
    ]
    assert [(r["rank"], r["world_size"], r["launcher"]) for r in described] == [
        (0, 2, launcher),
        (1, 2, launcher),
    ]
    assert [word for word in described[0]["argv"] if word.startswith("--allow")] == words[2:]
    assert not list(tmp_path.rglob("hacked"))


def test_train_py_trains_on_two_ranks_through_deepspeed(tmp_path, tiny_spec_file, tiny_data):
    config = tmp_path / "c.json"
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    config.write_text(
        json.dumps({"train_batch_size": 8, "gradient_accumulation_steps": 1, "optimizer": adam})
    )
    words = [
        f"--config={config}",
        f"--model={tiny_spec_file}",
        f"--data={tiny_data}",
        "--steps=2",
        "--no-eval",
    ]
    train = STARTER.replace(str(PROGRAM), str(Path(__file__).parents[1] / "launcher/train.py"))
    started = subprocess.run(
        [
            sys.executable,
            "-c",
            train,
            *words,
            "--processes=2",
            "--device=cpu",
            f"--output={tmp_path / 'run'}",
        ],
        capture_output=True,
        text=True,
    )
    assert started.returncode == 0, started.stderr
    assert "world size 2: 1 node(s), 2 process(es) on this one, started by deepspeed" in started.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2


def test_dry_run_prints_the_command_and_starts_nothing(tmp_path):
    shown = subprocess.run(
        [sys.executable, "-c", STARTER, "--config=a b.json", "--gpus=2", "--dry-run"],
        capture_output=True,
        text=True,
    )
    assert shlex.split(shown.stdout)[1:] == [
        "-m", "deepspeed.launcher.runner", "--num_gpus=2", "--master_port=29500",
        str(PROGRAM), "--config=a b.json",
    ]  # fmt: skip


def test_a_launch_is_known_by_its_environment_alone():
    sleeper = subprocess.Popen(["sleep", "60"], env={family.VARIABLE: "test-launch"}, start_new_session=True)
    try:
        time.sleep(0.1)
        assert [process.pid for process in family.members("test-launch")] == [sleeper.pid]
        assert family.members("another") == []
        assert family.end("test-launch", save_seconds=0) == [-signal.SIGTERM]
    finally:
        sleeper.kill()
