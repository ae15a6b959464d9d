"""Batch scripts as text: those checked in are as generated, shellcheck finds nothing, values stay values."""

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from launcher import submission
from launcher.commands import submit as command
from launcher.rendezvous import choose_address, choose_port
from launcher.slurm import SlurmJob, directive, render, seconds_of
from launcher.slurm_examples import EXAMPLES, render_examples, write_examples
from models.errors import DoesNotFit, UserError

SCRIPTS = Path(__file__).parents[1] / "slurm"
JOB = SlurmJob(
    name="j", nodes=2, tasks_per_node=4, gpus_per_node=4, time="1:00:00", train=("--config=c.json",)
)
VARIANTS = {
    "pyxis": {"container_image": "nvcr.io#nvidia/pytorch:25.01"},
    "apptainer": {"apptainer_image": "my image.sif"},
    "environment": {
        "modules": ("cuda/12", "gcc"),
        "venv": "/home/a b/venv",
        "environment": (("A", "it's $x"),),
    },
    "sweep": {"sweep": (("--seed=1", "--output=a b"), ("--seed=2",)), "sweep_at_once": 1},
    "no gpus, no output": {"gpus_per_node": 0, "output": None},
}


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["--config=ds_configs/bf16.json", *words])


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


def variant(name: str) -> SlurmJob:
    return SlurmJob(**(vars(JOB) | VARIANTS[name]))


def test_checked_in_scripts_are_as_generated():
    assert {path.name: path.read_text() for path in SCRIPTS.glob("*.sbatch")} == render_examples()
    assert write_examples(SCRIPTS, check=True) == 0


def test_a_changed_script_is_named(tmp_path):
    write_examples(tmp_path)
    (tmp_path / "1x8.sbatch").write_text("edited")
    with pytest.raises(UserError, match=r"1x8\.sbatch"):
        write_examples(tmp_path, check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here (run .ci/packages)")
@pytest.mark.parametrize("name", [*VARIANTS, *EXAMPLES])
def test_shellcheck_finds_nothing(name):
    script = render(variant(name) if name in VARIANTS else EXAMPLES[name])
    # SC2016: dollars in single quotes are what keeps an argument literal; SC1091: the venv is elsewhere
    checked = subprocess.run(
        ["shellcheck", "--exclude=SC2016,SC1091", "-"], input=script, text=True, capture_output=True
    )
    assert checked.stdout == ""


@pytest.mark.parametrize("name", VARIANTS)
def test_bash_can_read_the_script(name):
    subprocess.run(["bash", "-n"], input=render(variant(name)), text=True, check=True)


def test_the_job_asks_for_what_signals_and_restarts_need():
    lines = directives(render(JOB))
    for line in (
        "--signal=B:USR2@120",
        "--requeue",
        "--open-mode=append",
        "--nodes=2",
        "--ntasks-per-node=4",
    ):
        assert line in lines
    assert "--gpus-per-node=4" in lines


def test_arguments_stay_single_words_for_bash():
    awkward = ("a b", "it's", "$HOME", "$(touch x)", "new\nline", "*", "-x", "")
    script = render(SlurmJob(**(vars(JOB) | {"train": awkward})))
    array = script[script.index("train=(") : script.index("\n)\n", script.index("train=(")) + 3]
    shown = subprocess.run(
        ["bash", "-c", array + 'printf "%s\\0" "${train[@]}"'], capture_output=True, text=True
    )
    assert shown.stdout.split("\0")[:-1] == list(awkward)


def test_containers_run_the_python_of_their_image():
    assert "python=(apptainer exec --nv 'my image.sif' python)" in render(variant("apptainer"))
    pyxis = render(variant("pyxis"))
    assert "srun_options=('--container-image=nvcr.io#nvidia/pytorch:25.01')" in pyxis
    assert "on_first_node=(srun --nodes=1" in pyxis


def test_an_array_gives_each_task_its_options_and_its_run_directory():
    script = render(SlurmJob(**(vars(JOB) | VARIANTS["sweep"] | {"output": "o"})))
    assert "--array=0-1%1" in directives(script)
    assert "0) train+=(--seed=1 '--output=a b') ;;" in script
    assert "output=o/$SLURM_ARRAY_TASK_ID" in script


def test_comments_and_directives_cannot_be_left():
    script = render(JOB, command="vlfit submit --output 'a\nrm -rf x'")
    assert "\nrm -rf" not in script
    with pytest.raises(UserError, match="line break"):
        directive("account", "a\n#SBATCH --uid=0")


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("30", 1800), ("1:30", 90), ("24:00:00", 86400), ("2-12", 216000), ("1-0:30", 88200), ("0-0:0:5", 5)],
)  # as in the manual of sbatch, --time
def test_times_of_slurm(time, seconds):
    assert seconds_of(time) == seconds


@pytest.mark.parametrize("time", ["", "1h", "1:2:3:4", "2:00"])
def test_a_time_that_leaves_nothing_to_train_is_refused(time):
    with pytest.raises(UserError, match="--time"):
        SlurmJob(**(vars(JOB) | {"time": time}))


def test_submit_takes_the_options_of_train_and_of_sbatch(tmp_path):
    partition = tmp_path / "two.yaml"
    partition.write_text("stages: [a, b]\n")
    arguments = parse(
        "--nodes=2", "--gpus-per-node=8", "--steps=9", "--account=me", "-p", "gpu", "--output=o",
        "--partition-spec", str(partition), "--resume=none", "--", "--exclusive=user",
    )  # fmt: skip
    job = submission.job_from_arguments(arguments)
    assert job.tasks_per_node == 4  # two stages in each process
    assert job.train == ("--config=ds_configs/bf16.json", f"--partition={partition}", "--steps=9")
    assert {"--partition=gpu", "--account=me", "--exclusive=user"} <= set(directives(render(job)))
    assert job.output == "o"


def test_partition_is_told_apart_by_its_ending(tmp_path):
    assert ("partition", "gpu") in submission.job_from_arguments(parse("--partition=gpu")).directives
    (tmp_path / "p.yaml").write_text("stages: [a]")
    job = submission.job_from_arguments(parse(f"--partition={tmp_path / 'p.yaml'}"))
    assert f"--partition={tmp_path / 'p.yaml'}" in job.train
    with pytest.raises(UserError, match="--partition-spec"):
        submission.job_from_arguments(parse("--partition=gpu", "-p", "other"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data=/nowhere/store"], "--data /nowhere/store"),
        (["--nodes=0"], "--nodes 0"),
        (["--env=A"], "--env A"),
        (["--", "--exclusive"], "--name=value"),
    ],
)
def test_what_cannot_run_is_refused_before_the_queue(words, said):
    arguments = parse("--dry-run", *words)
    with pytest.raises(UserError, match=said):
        submission.check(submission.job_from_arguments(arguments), arguments)


def test_batch_arithmetic_is_checked_for_nodes_times_gpus(tmp_path):
    config = tmp_path / "c.json"
    config.write_text(
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,'
        ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}'
    )
    arguments = parse("--dry-run", f"--config={config}", "--nodes=2", "--gpus-per-node=4")
    submission.check(submission.job_from_arguments(arguments), arguments)
    arguments = parse("--dry-run", f"--config={config}", "--nodes=3", "--gpus-per-node=4")
    with pytest.raises(UserError, match="12"):
        submission.check(submission.job_from_arguments(arguments), arguments)


def test_plan_that_does_not_fit_the_gpu_is_refused_before_the_queue():
    words = ["--dry-run", "--config=ds_configs/bf16.json", "--gpus-per-node=1"]
    small = parse(*words, "--gpu=A100-40", "--model=demo")
    submission.check(submission.job_from_arguments(small), small)
    large = parse(*words, "--gpu=T4", "--model=bert_vit_large")
    large.config = "ds_configs/fp32.json"
    with pytest.raises(
        DoesNotFit, match=r"needs \d+\.\d GiB .* T4 has .*vlfit plan --model bert_vit_large --gpu T4"
    ):
        submission.check(submission.job_from_arguments(large), large)


def test_rank_0_is_never_at_a_loopback_address_of_several_nodes():
    interfaces = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"], "ib0": ["192.168.9.5"]}
    # Debian resolves a host's own name to 127.0.1.1
    assert choose_address(["127.0.1.1"], interfaces, None) == "10.0.0.5"
    assert choose_address(["192.168.9.5"], interfaces, None) == "192.168.9.5"
    # a name that resolves to another machine is not this one
    assert choose_address(["1.2.3.4"], interfaces, None) == "10.0.0.5"
    assert choose_address([], interfaces, "ib") == "192.168.9.5"
    with pytest.raises(UserError, match="no interface mlx5"):
        choose_address([], interfaces, "mlx5")
    with pytest.raises(UserError, match="MASTER_ADDR"):
        choose_address(["127.0.1.1"], {"lo": ["127.0.0.1"]}, None)


def test_a_port_in_use_is_named_and_passed_over(capsys):
    import socket

    first = choose_port("127.0.0.1", 4711)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", first))
        listener.listen()
        assert choose_port("127.0.0.1", 4711) != first
    assert f"port {first} of 127.0.0.1 cannot be used" in capsys.readouterr().err


def test_dry_run_prints_the_script(capsys):
    assert command.run(parse("--dry-run", "--gpus-per-node=2", "--output=a b")) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n")
    assert "output='a b'" in script


def test_a_folder_whose_name_slurm_would_change_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "100%j"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="replaces %"):
        submission.submit("#!/bin/bash\n")
