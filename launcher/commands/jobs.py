"""``vlfit jobs``: this user's runs on SLURM, with state, step, loss and time left."""

import argparse

HELP = "list your runs on SLURM with their state, step, loss and time left"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the jobs; gives 0."""
    import json

    from launcher.jobs import list_jobs

    jobs = list_jobs()
    if arguments.json:
        print(json.dumps([vars(job) | {"run": str(job.run) if job.run else None} for job in jobs], indent=2))
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("job", "name", "state", "step", "loss", "time left", "run", box=box.SIMPLE)
    for job in jobs:
        state = f"{job.state} {job.reason}" if job.state == "PENDING" else job.state
        step = "" if job.step is None else str(job.step)
        loss = "" if job.loss is None else f"{job.loss:.4f}"
        words = (job.job_id, job.name, state, step, loss, job.time_left, str(job.run or ""))
        table.add_row(*(word.replace("[", "\\[") for word in words))
    Console().print(table if jobs else "no jobs in the queue")
    return 0
