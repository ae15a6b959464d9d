"""Renders a training run as a batch script of SLURM: a pure function of plain values to text.

The upper part of the script is made here and holds all that differs between runs: ``#SBATCH`` lines, the
environment, the program's arguments. The lower part, ``job.sbatch``, is the same in every script. It
starts one task per process by ``srun``, hands signals on, and asks SLURM to requeue the job when the
workers say (exit code 75) that they saved and were interrupted.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from models.errors import UserError

BODY = Path(__file__).with_name("job.sbatch")
LOG = "runs/slurm-%j.log"
ARRAY_LOG = "runs/slurm-%A_%a.log"


@dataclass(frozen=True)
class SlurmJob:
    """What a job asks of SLURM and how the program is started in it.

    ``directives`` are more options of sbatch (``account``, ``partition``, …), by name without dashes;
    ``sweep`` has one argument vector for each task of an array.
    """

    name: str
    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    time: str
    cpus_per_task: int = 1
    directives: tuple[tuple[str, str], ...] = ()
    sweep: tuple[tuple[str, ...], ...] = ()
    sweep_at_once: int | None = None
    signal_seconds: int = 120
    restarts_max: int = 20
    modules: tuple[str, ...] = ()
    venv: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    container_image: str | None = None
    apptainer_image: str | None = None
    python: str = "python"
    program: tuple[str, ...] = ("launcher/train.py",)
    train: tuple[str, ...] = field(default=())
    output: str | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "tasks_per_node", "cpus_per_task", "signal_seconds"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least 1 is needed")
        if self.gpus_per_node < 0:
            raise UserError(f"--gpus-per-node {self.gpus_per_node} is negative")
        if self.container_image and self.apptainer_image:
            raise UserError("--container-image (pyxis) and --apptainer exclude each other")
        if seconds_of(self.time) <= self.signal_seconds:
            raise UserError(
                f"--time {self.time} leaves nothing to train: the run is told to save "
                f"{self.signal_seconds} s before it ends"
            )

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.nodes * self.tasks_per_node

    @property
    def log(self) -> str:
        """SLURM's pattern of the job's log."""
        return ARRAY_LOG if self.sweep else LOG


def render(job: SlurmJob, command: str = "vlfit submit") -> str:
    """Give the batch script; ``command`` is what the first line says wrote it."""
    directives = [
        ("job-name", job.name),
        ("nodes", str(job.nodes)),
        ("ntasks-per-node", str(job.tasks_per_node)),
        *([("gpus-per-node", str(job.gpus_per_node))] if job.gpus_per_node else []),
        ("cpus-per-task", str(job.cpus_per_task)),
        ("time", job.time),
        *job.directives,
        *([("array", _array(job))] if job.sweep else []),
        ("output", job.log),
        ("open-mode", "append"),
        ("signal", f"B:USR2@{job.signal_seconds}"),
    ]
    lines = [
        "#!/bin/bash",
        f"# Written by {one_line(command)}. Edit it as you like: nothing reads it back.",
        *(directive(name, value) for name, value in directives),
        "#SBATCH --requeue",
        "",
        *_environment(job),
        "set -euo pipefail",
        "",
        *_settings(job),
        "",
    ]
    return "\n".join(lines) + BODY.read_text(encoding="utf-8")


def directive(name: str, value: str) -> str:
    """Give one ``#SBATCH`` line; sbatch takes off double quotes and backslashes, and nothing else."""
    if any(character in value for character in "\n\r\0"):
        raise UserError(f"--{name}: a line of #SBATCH cannot hold a line break: {value!r}")
    if not re.fullmatch(r"[\w@%+=:,./*\[\]&|()-]+", value):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"#SBATCH --{name}={value}"


def seconds_of(time: str) -> int:
    """Seconds of a time of SLURM: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise UserError(f"--time {time}: not a time of SLURM, such as 24:00:00 or 2-12:00:00")
    days, *fields = match.groups()
    numbers = [int(number) for number in fields if number is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def one_line(text: str) -> str:
    """Text that cannot leave a comment: no line breaks or other control characters."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _array(job: SlurmJob) -> str:
    return f"0-{len(job.sweep) - 1}" + (f"%{job.sweep_at_once}" if job.sweep_at_once else "")


def _environment(job: SlurmJob) -> list[str]:
    # before "set -u", which the functions of environment modules and old activate scripts do not survive
    commands = [f"module load {shlex.quote(name)}" for name in job.modules]
    if job.venv:
        commands.append(f"source {shlex.quote(job.venv.rstrip('/') + '/bin/activate')}")
    lines = [
        f"{command} || {{ echo {shlex.quote('failed: ' + command)} >&2; exit 2; }}" for command in commands
    ]
    return lines + [f"export {name}={shlex.quote(value)}" for name, value in job.environment]


def _settings(job: SlurmJob) -> list[str]:
    lines = [f"restarts_max={job.restarts_max}"]
    if job.output is not None:
        output = shlex.quote(job.output)
        # tasks of an array each have a run directory of their own
        lines.append(f"output={output}" + ("/$SLURM_ARRAY_TASK_ID" if job.sweep else ""))
    # in a container, the address of the first node is found with the container's python
    python, on_first_node, srun_options = [job.python], [], []
    if job.apptainer_image:
        python = ["apptainer", "exec", "--nv", job.apptainer_image, job.python]
    if job.container_image:
        srun_options = [f"--container-image={job.container_image}"]
        on_first_node = ["srun", "--nodes=1", "--ntasks=1", "--relative=0", *srun_options]
    lines += [
        _bash_array("on_first_node", on_first_node),
        _bash_array("srun_options", srun_options),
        _bash_array("python", python),
        _bash_array("program", job.program),
        _bash_array("train", job.train, one_per_line=True),
    ]
    if job.sweep:
        lines.append("case $SLURM_ARRAY_TASK_ID in")
        lines += [
            f"    {index}) train+=({' '.join(map(shlex.quote, vector))}) ;;"
            for index, vector in enumerate(job.sweep)
        ]
        lines.append("esac")
    return lines


def _bash_array(name: str, values: Sequence[str], one_per_line: bool = False) -> str:
    quoted = [shlex.quote(value) for value in values]
    if one_per_line and quoted:
        return f"{name}=(\n" + "".join(f"    {value}\n" for value in quoted) + ")"
    return f"{name}=({' '.join(quoted)})"
