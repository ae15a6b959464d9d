"""From the options of ``vlfit submit`` to a job in SLURM's queue: checks first, then ``sbatch``."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from launcher.options import train_arguments
from launcher.slurm import SlurmJob
from models.errors import UserError


def job_from_arguments(arguments: argparse.Namespace) -> SlurmJob:
    """Build the job; raises UserError for options that contradict each other."""
    from launcher.commands.submit import SBATCH_OPTIONS
    from launcher.processes import processes_per_node

    arguments = _separate_partitions(arguments)
    named = [names[0].removeprefix("--") for names in SBATCH_OPTIONS]
    directives = [("partition", arguments.slurm_partition)] if arguments.slurm_partition else []
    for name in named:
        value = getattr(arguments, name.replace("-", "_"))
        if value is not None:
            directives.append((name, value))
    directives += [_directive(word) for word in arguments.sbatch]
    train = [word for word in train_arguments(arguments) if not word.startswith(("--output=", "--resume="))]
    return SlurmJob(
        name=arguments.job_name or Path(arguments.config).stem,
        nodes=arguments.nodes,
        tasks_per_node=arguments.tasks_per_node or processes_per_node(arguments, arguments.gpus_per_node),
        gpus_per_node=arguments.gpus_per_node,
        cpus_per_task=arguments.cpus_per_task,
        time=arguments.time,
        directives=tuple(directives),
        sweep=tuple(tuple(shlex.split(vector)) for vector in arguments.sweep),
        sweep_at_once=arguments.sweep_at_once,
        signal_seconds=arguments.save_seconds,
        restarts_max=arguments.restarts_max,
        modules=tuple(arguments.module),
        venv=arguments.venv,
        environment=tuple(_variable(word) for word in arguments.env),
        container_image=arguments.container_image,
        apptainer_image=arguments.apptainer,
        python=arguments.python,
        program=(_program(),),
        train=tuple(train),
        output=arguments.output,
    )


def check(job: SlurmJob, arguments: argparse.Namespace) -> None:
    """Refuse before the queue what would fail after it: files, batch arithmetic, sbatch itself."""
    from launcher.config import DeviceSupport, load_config
    from launcher.processes import data_parallel_size

    for option in ("data", "venv"):
        value = getattr(arguments, option)
        if value and not Path(value).exists():
            raise UserError(f"--{option} {value}: no such file or directory")
    gpu = job.gpus_per_node > 0 and arguments.device != "cpu"
    device = DeviceSupport(type="cuda" if gpu else "cpu", fp16=gpu, bf16=True)
    load_config(arguments.config).resolve(
        world_size=data_parallel_size(arguments, job.world_size), device=device
    )
    if arguments.gpu:
        check_memory(job, arguments)
    if not arguments.dry_run and shutil.which("sbatch") is None:
        raise UserError("sbatch is not here: submit on a login node of the cluster, or use --dry-run")


def check_memory(job: SlurmJob, arguments: argparse.Namespace) -> None:
    """Refuse a plan that will not fit ``--gpu``, with what it needs. Raises DoesNotFit."""
    from launcher.estimate import estimate
    from launcher.plan import DEFAULT_MODEL
    from launcher.plan_command import plan_command
    from models.errors import DoesNotFit

    arguments = _separate_partitions(arguments)
    model = arguments.model or DEFAULT_MODEL
    planned, capacity_bytes = estimate(
        argparse.Namespace(
            config=arguments.config,
            model=model,
            partition=arguments.partition,
            pipeline=arguments.pipeline,
            world_size=job.world_size,
            gpu=arguments.gpu,
            gpus_per_node=job.gpus_per_node or None,
            memory=None,
        )
    )
    if planned.over_bytes:
        worst = planned.prediction.worst
        command = plan_command(
            model,
            arguments.gpu,
            gpus_per_node=job.gpus_per_node,
            nodes=job.nodes,
            global_batch=planned.choices["global_batch_size"],
        )
        raise DoesNotFit(
            f"this plan needs {planned.needed_bytes / 2**30:.1f} GiB on {worst.device} and {arguments.gpu} has "
            f"{capacity_bytes / 2**30:.1f} GiB; find one that fits: {command}"
        )


def submit(script: str) -> str:
    """Hand the script to ``sbatch``; gives the job id."""
    if set("%\\") & set(os.getcwd()):
        raise UserError(
            f"{os.getcwd()}: SLURM replaces % and \\ in the path of a log; submit from another folder"
        )
    Path("runs").mkdir(exist_ok=True)  # sbatch fails silently where the folder of the log is missing
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"sbatch: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip().split(";")[0]


def log_path(job: SlurmJob, job_id: str) -> Path:
    """Log of the job (of an array: of its first task)."""
    return Path(job.log.replace("%j", job_id).replace("%A", job_id).replace("%a", "0"))


def follow(job_id: str, log: Path, poll_seconds: float = 1.0) -> int:
    """Print the job's log as it grows, over restarts, until the job ends; gives its exit code."""
    position = 0
    while True:
        fields = job_fields(job_id)
        if log.exists():
            with log.open("rb") as opened:
                opened.seek(position)
                chunk = opened.read()
            position += len(chunk)
            sys.stdout.write(chunk.decode(errors="replace"))
            sys.stdout.flush()
        state = fields.get("JobState", "")
        if state not in (
            "PENDING",
            "RUNNING",
            "COMPLETING",
            "CONFIGURING",
            "SUSPENDED",
            "REQUEUED",
            "RESIZING",
        ):
            code, _, killed_by = fields.get("ExitCode", "1:0").partition(":")
            print(f"job {job_id}: {state or 'no longer known to SLURM'}", file=sys.stderr)
            number = int(code) or (128 + int(killed_by) if killed_by not in ("", "0") else 0)
            return number if state == "COMPLETED" else number or 1
        time.sleep(poll_seconds)


def job_fields(job_id: str) -> dict[str, str]:
    """Fields of ``scontrol show job``; none where SLURM has forgotten the job."""
    shown = subprocess.run(["scontrol", "--oneliner", "show", "job", job_id], capture_output=True, text=True)
    return dict(re.findall(r"(\S+?)=(\S*)", shown.stdout.splitlines()[0])) if shown.stdout else {}


def _separate_partitions(arguments: argparse.Namespace) -> argparse.Namespace:
    """Both train.py and sbatch have a --partition: a YAML file is the plan's."""
    separated = argparse.Namespace(**vars(arguments))
    if separated.partition and not separated.partition.endswith((".yaml", ".yml")):
        if separated.slurm_partition:
            raise UserError(
                f"--partition {separated.partition} is not a YAML file, and SLURM's partition is given as "
                f"{separated.slurm_partition}; the plan's partition file is --partition-spec"
            )
        separated.slurm_partition, separated.partition = separated.partition, None
    if separated.partition_spec:
        if separated.partition:
            raise UserError("--partition-spec and --partition both name a partition file; keep one")
        separated.partition = separated.partition_spec
    return separated


def _directive(word: str) -> tuple[str, str]:
    match = re.fullmatch(r"--([a-z][a-z-]*)=(.*)", word, re.DOTALL)
    if match is None:
        raise UserError(f"{word}: options of sbatch after -- are written --name=value")
    return match[1], match[2]


def _variable(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UserError(f"--env {word}: must be NAME=VALUE")
    return name, value


def _program() -> str:
    """train.py: by its path in the repository where the job starts there, else where it is installed."""
    relative = Path("launcher/train.py")
    return str(relative if relative.exists() else Path(__file__).with_name("train.py"))
