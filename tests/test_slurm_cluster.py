"""The generated batch script on a real SLURM of two nodes: trains, saves, comes back, fails loudly.

The program is ``rank_program.py``, a small real training by torch.distributed over gloo.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, is_alive, slurm_cluster, wait_until  # noqa: F401 (a fixture)

from launcher import jobs, submission
from launcher.commands import submit as submit_command
from launcher.distributed import port_of_job
from launcher.hostlist import expand_hostlist
from launcher.slurm import SlurmJob, render

PROGRAM = str(Path(__file__).with_name("rank_program.py"))
ROOT = Path(__file__).parents[1]
TRAIN, CONFIG = str(ROOT / "launcher/train.py"), str(ROOT / "ds_configs/fp32.json")
AWKWARD = [
    "a b",
    "it's",
    'say "x"',
    "$HOME",
    "$(touch hacked)",
    "`touch hacked`",
    "new\nline",
    "%t",
    "*",
    "\\",
]


def job_of(nodes: int = 1, tasks: int = 1, steps: int = 3, **changes) -> SlurmJob:
    environment = {"OMP_NUM_THREADS": "1"} | changes.pop("environment", {})
    return SlurmJob(
        **{
            "name": "test",
            "nodes": nodes,
            "tasks_per_node": tasks,
            "gpus_per_node": tasks,
            "time": "10",
            "python": sys.executable,
            "program": (PROGRAM,),
            "train": ("--config=c.json", f"--steps={steps}", "--seed=1"),
            "output": "run",
            "environment": tuple(environment.items()),
        }
        | changes
    )


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path


def submit(cluster: SlurmCluster, job: SlurmJob, work: Path, *options: str) -> str:
    script = work / "job.sbatch"
    script.write_text(render(job))
    return cluster.submit(*options, str(script), cwd=work)


def metrics(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ranks(run: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((run / "ranks").glob("*.json"))]


def log_of(work: Path, job_id: str) -> str:
    path = work / "runs" / f"slurm-{job_id}.log"
    return path.read_text() if path.exists() else "no log yet"


def wait_for_step(work: Path, job_id: str, step: int, run: str = "run") -> None:
    wait_until(
        lambda: any(m["step"] >= step for m in metrics(work / run)),
        40,
        f"step {step}",
        lambda: log_of(work, job_id),
    )


def test_each_task_knows_its_place(slurm_cluster, work):  # noqa: F811
    job_id = submit(slurm_cluster, job_of(nodes=2, tasks=2, environment={"TEST_NO_TORCH": "1"}), work)
    assert slurm_cluster.wait(job_id)["JobState"] == "COMPLETED", log_of(work, job_id)
    described = ranks(work / "run")
    places = [(r["rank"], r["node_rank"], r["local_rank"]) for r in described]
    assert places == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert {(r["world_size"], r["nodes"], r["launcher"]) for r in described} == {(4, 2, "slurm")}
    assert not described[0]["master_address"].startswith("127.")


def test_train_py_gives_the_losses_of_torchrun(slurm_cluster, work, tiny_spec_file, tiny_data):  # noqa: F811
    config = work / "c.json"
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    config.write_text(
        json.dumps({"train_batch_size": 8, "gradient_accumulation_steps": 1, "optimizer": adam})
    )
    train = [f"--config={config}", f"--model={tiny_spec_file}", f"--data={tiny_data}"]
    train += ["--steps=3", "--seed=1", "--no-eval", "--device=cpu"]
    job = job_of(nodes=2, tasks=2, program=(TRAIN,), train=tuple(train))
    job_id = submit(slurm_cluster, job, work)
    assert slurm_cluster.wait(job_id, seconds=120)["JobState"] == "COMPLETED", log_of(work, job_id)
    assert "world size 4: 2 node(s), 2 process(es) on this one, started by slurm" in log_of(work, job_id)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", TRAIN]
    subprocess.run([*torchrun, *train, "--output=reference"], cwd=work, check=True, capture_output=True)
    ours, theirs = metrics(work / "run"), metrics(work / "reference")
    assert [m["step"] for m in ours] == [1, 2, 3]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert mine["samples"] == other["samples"]


def test_submit_follows_a_job_that_vlfit_jobs_lists(slurm_cluster, work, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(work)
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", slurm_cluster.environment["SLURM_CONF"])
    monkeypatch.setattr(submission, "_program", lambda: PROGRAM)
    words = [f"--config={CONFIG}", "--steps=30", "--output=o", "--cpus-per-task=1", "--time=10", "--wait"]
    words += [f"--python={sys.executable}", "--env=TEST_STEP_SECONDS=0.1", "--env=TEST_FAIL=0:29"]
    listed: list[jobs.Job] = []
    asked = submission.job_fields

    def ask_and_list(job_id: str) -> dict[str, str]:
        listed.extend(jobs.list_jobs())
        return asked(job_id)

    monkeypatch.setattr(submission, "job_fields", ask_and_list)
    parser = argparse.ArgumentParser()
    submit_command.add_arguments(parser)
    assert submit_command.run(parser.parse_args(words)) == 1
    said = capsys.readouterr()
    assert "step 20 loss" in said.out
    assert "rank 0 was told to fail" in said.out
    assert said.err.splitlines()[-1].endswith(": FAILED")
    running = [job for job in listed if job.step is not None]
    assert running, listed
    assert {(job.name, job.state, str(job.run)) for job in running} == {("fp32", "RUNNING", str(work / "o"))}


@pytest.mark.slow  # SLURM holds a requeued job back, and looks at time limits every 30 s
@pytest.mark.parametrize("cause", ["scancel", "time limit"])
def test_an_interrupted_run_saves_is_requeued_and_ends_as_if_nothing_was(slurm_cluster, work, cause):  # noqa: F811
    steps = 600
    job = job_of(
        nodes=2,
        steps=steps,
        environment={"TEST_STEP_SECONDS": "0.1", "TEST_CHILD": "1", "TEST_WORLD": "2"},
    )
    if cause == "time limit":
        # SLURM looks at limits every 30 s, and rounds this one up to two minutes
        job = replace(job, time="1:30", signal_seconds=89)
    job_id = submit(slurm_cluster, job, work)
    wait_for_step(work, job_id, 3)
    if cause == "scancel":
        slurm_cluster.run("scancel", "--signal=USR2", "--batch", job_id)
    slurm_cluster.wait_for_restart(job_id)
    slurm_cluster.wait(job_id)
    log = log_of(work, job_id)
    fields = slurm_cluster.job(job_id)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), log
    assert "restart 0" in log
    assert "saved; requeued" in log
    assert "child alive" in log  # a child of a rank survived the signal, which srun gives to all
    assert "restart 1" in log
    lines = metrics(work / "run")
    assert [m["step"] for m in lines] == list(range(1, steps + 1))
    assert {m["restart"] for m in lines} == {"0", "1"}

    alone = [sys.executable, PROGRAM, "--config=c.json", f"--steps={steps}", "--seed=1", "--output=reference"]
    subprocess.run(alone, cwd=work, check=True, capture_output=True)
    reference = metrics(work / "reference")
    assert [m["samples"] for m in lines] == [m["samples"] for m in reference]
    assert lines[-1]["loss"] == pytest.approx(reference[-1]["loss"], abs=1e-6)


@pytest.mark.slow  # SLURM holds a requeued job back
def test_train_py_is_requeued_and_ends_as_if_nothing_was(slurm_cluster, work, tiny_spec_file, tiny_data):  # noqa: F811
    config = work / "c.json"
    config.write_text(
        json.dumps({"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    )
    steps = 300
    train = [f"--config={config}", f"--model={tiny_spec_file}", f"--data={tiny_data}"]
    train += [f"--steps={steps}", "--seed=1", "--no-eval", "--device=cpu", "--workers=1"]
    job_id = submit(slurm_cluster, job_of(nodes=2, program=(TRAIN,), train=tuple(train)), work)
    wait_for_step(work, job_id, 3)
    slurm_cluster.run("scancel", "--signal=USR2", "--batch", job_id)
    slurm_cluster.wait_for_restart(job_id)
    slurm_cluster.wait(job_id, seconds=120)
    log = log_of(work, job_id)
    fields = slurm_cluster.job(job_id)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), log
    assert "SIGUSR2: saving after step" in log and "saved; requeued" in log and "resuming after step" in log
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", TRAIN]
    subprocess.run([*torchrun, *train, "--output=reference"], cwd=work, check=True, capture_output=True)
    ours, theirs = metrics(work / "run"), metrics(work / "reference")
    assert [m["step"] for m in ours] == list(range(1, steps + 1))
    assert [(m["loss"], m["samples"]) for m in ours] == [(m["loss"], m["samples"]) for m in theirs]


def test_a_requeued_array_task_leaves_its_siblings_alone(slurm_cluster, work):  # noqa: F811
    job = job_of(
        steps=60,
        environment={"TEST_STEP_SECONDS": "0.1"},
        sweep=(("--seed=5",), ("--seed=6",)),
        output="sweep",
    )
    array = submit(slurm_cluster, job, work)
    # SLURM gives the array's own id to one of its tasks: requeueing by job id would take all
    by_id = {slurm_cluster.job(f"{array}_{task}")["JobId"]: task for task in (0, 1)}
    task = by_id[array]
    sibling = 1 - task
    for index in (0, 1):
        wait_for_step(work, f"{array}_{index}", 3, f"sweep/{index}")
    slurm_cluster.run("scancel", "--signal=USR2", "--batch", f"{array}_{task}")
    slurm_cluster.wait_for_restart(f"{array}_{task}")
    for index in (0, 1):
        slurm_cluster.wait(f"{array}_{index}")
    assert {m["restart"] for m in metrics(work / f"sweep/{task}")} == {"0", "1"}
    assert {m["restart"] for m in metrics(work / f"sweep/{sibling}")} == {"0"}
    assert "--seed=5" in ranks(work / "sweep/0")[0]["argv"]
    assert "--seed=6" in ranks(work / "sweep/1")[0]["argv"]


def test_restarts_are_capped_and_a_cancelled_job_does_not_come_back(slurm_cluster, work):  # noqa: F811
    slow = job_of(steps=600, environment={"TEST_STEP_SECONDS": "0.1"})
    capped = submit(slurm_cluster, replace(slow, restarts_max=0), work)
    cancelled = submit(slurm_cluster, replace(slow, output="other"), work)
    wait_for_step(work, capped, 2)
    wait_for_step(work, cancelled, 2, "other")
    slurm_cluster.run("scancel", "--signal=USR2", "--batch", capped)
    slurm_cluster.run("scancel", cancelled)
    fields = slurm_cluster.wait(capped)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "75:0")
    assert "restarted 0 times (restarts_max)" in log_of(work, capped)
    assert slurm_cluster.wait(cancelled)["JobState"] == "CANCELLED"
    time.sleep(1)
    assert slurm_cluster.state(cancelled) == "CANCELLED"
    assert "requeued" not in log_of(work, cancelled).replace("not requeued", "")


def test_a_killed_task_ends_the_job_as_failed_and_leaves_no_process(slurm_cluster, work):  # noqa: F811
    job = job_of(nodes=2, steps=600, environment={"TEST_STEP_SECONDS": "0.1", "TEST_CHILD": "1"})
    job_id = submit(slurm_cluster, job, work)
    wait_for_step(work, job_id, 2)
    started = time.monotonic()
    os.kill(ranks(work / "run")[1]["pid"], signal.SIGKILL)
    fields = slurm_cluster.wait(job_id)
    assert time.monotonic() - started < 60
    assert fields["JobState"] == "FAILED"
    assert fields["ExitCode"] != "0:0"
    wait_until(
        lambda: not slurm_cluster.job_processes(),
        20,
        "end of all processes",
        lambda: str(slurm_cluster.job_processes()),
    )
    assert not any(is_alive(rank["child"]) for rank in ranks(work / "run"))
    assert "first failure: n2: task 1: Killed" in log_of(work, job_id)


@pytest.mark.parametrize(
    ("changes", "exit_code", "said"),
    [
        ({"environment": {"TEST_WORLD": "4"}}, 2, "c.json needs 4 processes, but slurm started 2"),
        ({"train": ("--config=c.json", "--steps=1", "--data=/nowhere")}, 3, "/nowhere: no such data store"),
        ({"modules": ("no-such-module",)}, 2, "failed: module load no-such-module"),
        ({"environment": {"TEST_FAIL": "1:1"}}, 1, "rank 1 was told to fail"),
    ],
    ids=["world size", "data", "module", "exception"],
)  # fmt: skip
def test_what_went_wrong_stands_in_the_job_log(slurm_cluster, work, changes, exit_code, said):  # noqa: F811
    job_id = submit(slurm_cluster, job_of(nodes=2, **changes), work)
    fields = slurm_cluster.wait(job_id)
    log = log_of(work, job_id)
    assert fields["JobState"] == "FAILED", log
    if exit_code is not None:
        assert fields["ExitCode"] == f"{exit_code}:0", log
    assert sum(said in line for line in log.splitlines()) >= 1, log


def test_two_jobs_on_one_node_and_a_port_in_use_do_not_collide(slurm_cluster, work):  # noqa: F811
    probe = slurm_cluster.submit("--wrap=true", "--output=/dev/null")
    taken = port_of_job(int(probe) + 1)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", taken))
        listener.listen()
        slow = job_of(tasks=2, steps=10, environment={"TEST_STEP_SECONDS": "0.1"})
        jobs = [
            submit(slurm_cluster, replace(slow, output=f"run{i}"), work, "--nodelist=n1", "--gpus-per-node=1")
            for i in (0, 1)
        ]
        assert jobs[0] == str(int(probe) + 1)
        for job_id in jobs:
            assert slurm_cluster.wait(job_id)["JobState"] == "COMPLETED", log_of(work, job_id)
    assert f"port {taken} of 127.0.0.1 cannot be used (Address already in use)" in log_of(work, jobs[0])
    assert ranks(work / "run0")[0]["master_port"] != ranks(work / "run1")[0]["master_port"]


def test_awkward_names_and_arguments_reach_the_program_unchanged(slurm_cluster, tmp_path):  # noqa: F811
    work = tmp_path / "a dir; touch hacked; $(touch hacked) 'q'"
    (work / "runs").mkdir(parents=True)
    output = "out ' \" $HOME $(touch hacked) %t\nline"
    train = ["--config=c.json", "--steps=1", *(f"--allow-change={word}" for word in AWKWARD)]
    name = "na 'm' \"e\" $(touch hacked) \\ #"
    job = job_of(
        name=name,
        train=tuple(train),
        output=output,
        environment={"TEST_NO_TORCH": "1", "AWKWARD": AWKWARD[4]},
    )
    job_id = submit(slurm_cluster, job, work)
    assert slurm_cluster.wait(job_id)["JobState"] == "COMPLETED", log_of(work, job_id)
    assert ranks(work / output)[0]["argv"] == [*train, f"--output={output}", "--resume=auto"]
    assert (
        slurm_cluster.run("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%j").stdout[
            :-1
        ]
        == name
    )
    assert not list(tmp_path.rglob("hacked"))
    assert not (Path.cwd() / "hacked").exists()


def test_a_job_that_finished_does_not_train_again_when_it_is_requeued(slurm_cluster, work):  # noqa: F811
    job_id = submit(slurm_cluster, job_of(environment={"TEST_NO_TORCH": "1"}), work)
    assert slurm_cluster.wait(job_id)["JobState"] == "COMPLETED"
    slurm_cluster.run("scontrol", "requeue", job_id)
    slurm_cluster.wait_for_restart(job_id)
    assert slurm_cluster.wait(job_id)["JobState"] == "COMPLETED"
    assert "already finished" in log_of(work, job_id)


def test_node_lists_expand_as_scontrol_expands_them(slurm_cluster):  # noqa: F811
    for compact in ("n1", "n[08-10,2]", "rack[1-2]node[1-2],login,a[01-02]"):
        shown = slurm_cluster.run("scontrol", "show", "hostnames", compact).stdout.split()
        assert expand_hostlist(compact) == shown
