"""This user's runs in SLURM's queue, with what their run directories say of their progress."""

import getpass
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from models.errors import UserError

FIELDS = ("%i", "%T", "%L", "%Z", "%R", "%j")  # the name last: it may hold the separator
SEPARATOR = "|"


@dataclass(frozen=True)
class Job:
    """A job in the queue; ``step`` and ``loss`` are None until its run has made a step."""

    job_id: str
    state: str
    time_left: str
    folder: str
    reason: str
    name: str
    run: Path | None = None
    step: int | None = None
    loss: float | None = None


def parse_queue(text: str) -> list[Job]:
    """Jobs of squeue's output in the format of ``FIELDS``."""
    lines = [line for line in text.splitlines() if line.count(SEPARATOR) >= len(FIELDS) - 1]
    names = ("job_id", "state", "time_left", "folder", "reason", "name")
    return [
        Job(**dict(zip(names, line.split(SEPARATOR, len(FIELDS) - 1), strict=True)))  # type: ignore[arg-type]
        for line in lines
    ]


def list_jobs() -> list[Job]:
    """Ask ``squeue``; raises UserError where SLURM is not here or does not answer."""
    command = ["squeue", "--noheader", f"--user={getpass.getuser()}", f"--format={SEPARATOR.join(FIELDS)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise UserError("squeue is not here: vlfit jobs runs on a login node of a SLURM cluster") from None
    if done.returncode != 0:
        raise UserError(f"squeue: {done.stderr.strip()}")
    return [with_progress(job) for job in parse_queue(done.stdout)]


def with_progress(job: Job) -> Job:
    """Find the run directory of a job, which its log names, and read its last step."""
    marker = f"job {job.job_id}: run directory "
    try:
        with (Path(job.folder) / "runs" / f"slurm-{job.job_id}.log").open(errors="replace") as log:
            named = next((line.removeprefix(marker) for line in log if line.startswith(marker)), None)
    except OSError:
        named = None
    if named is None:
        return job
    run = Path(job.folder) / named.rstrip("\n")
    return Job(**vars(job) | {"run": run} | last_step(run / "metrics.jsonl"))


def last_step(metrics: Path) -> dict[str, float]:
    """Step and loss of the last whole line of a metrics file; nothing where there is none."""
    try:
        with metrics.open("rb") as opened:
            opened.seek(max(0, metrics.stat().st_size - 65536))
            lines = opened.read().split(b"\n")[:-1]  # a line without its end is still being written
        line = json.loads(lines[-1])
        return {"step": line["step"], "loss": line["loss"]}
    except (OSError, IndexError, KeyError, ValueError):
        return {}
