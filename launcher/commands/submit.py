"""``vlfit submit``: renders a batch script, submits it and says where its logs are."""

import argparse
import shlex

from launcher.options import add_train_options

HELP = "train on SLURM: render the batch script, submit it"

SBATCH_OPTIONS = (
    ("--account", "-A"), ("--qos", "-q"), ("--constraint", "-C"), ("--exclude", "-x"), ("--nodelist", "-w"),
    ("--mem",), ("--reservation",), ("--dependency", "-d"), ("--begin", "-b"),
    ("--mail-user",), ("--mail-type",),
)  # fmt: skip
"""Options of sbatch by name; any other stands after ``--``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command and every one of train.py."""
    add_train_options(parser, config_required=False)
    job = parser.add_argument_group("job")
    job.add_argument("--nodes", "-N", type=int, default=1, metavar="N")
    job.add_argument("--gpus-per-node", type=int, default=1, metavar="G")
    job.add_argument(
        "--tasks-per-node", type=int, metavar="N", help="default: what the plan needs for G GPUs"
    )
    job.add_argument("--cpus-per-task", type=int, default=8, metavar="N")
    job.add_argument("--time", "-t", default="24:00:00", metavar="T")
    job.add_argument("--job-name", "-J", metavar="NAME", help="default: the name of the config")
    job.add_argument(
        "--partition-spec", metavar="YAML", help="the plan's partition file (train.py: --partition)"
    )
    job.add_argument(
        "-p",
        "--slurm-partition",
        metavar="NAME",
        help="SLURM's partition; --partition takes either, by .yaml",
    )
    for names in SBATCH_OPTIONS:
        job.add_argument(*names, help=argparse.SUPPRESS)
    job.add_argument(
        "sbatch", nargs="*", metavar="-- SBATCH_OPTION", help="any other option of sbatch, after --"
    )
    job.add_argument("--sweep", action="append", default=[], metavar="'OPTIONS'", help="one task of an array")
    job.add_argument("--sweep-at-once", type=int, metavar="N", help="tasks of the array that run at a time")
    job.add_argument(
        "--save-seconds", type=int, default=120, metavar="S", help="time to save before the limit"
    )
    job.add_argument("--restarts-max", type=int, default=20, metavar="N")

    place = parser.add_argument_group("environment")
    place.add_argument("--module", action="append", default=[], metavar="NAME", help="module load NAME")
    place.add_argument("--venv", metavar="DIR", help="virtual environment to activate")
    place.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="variable to export")
    place.add_argument("--container-image", metavar="IMAGE", help="pyxis")
    place.add_argument("--apptainer", metavar="IMAGE", help="apptainer image")
    place.add_argument("--python", default="python", metavar="PROGRAM")
    place.add_argument("--gpu", metavar="NAME", help="check that the plan fits this GPU before submitting")

    action = parser.add_argument_group("action")
    action.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    action.add_argument("--wait", action="store_true", help="follow the job's log; exit with its code")
    action.add_argument(
        "--write", nargs="?", const="slurm", metavar="DIR", help="regenerate the scripts in slurm/"
    )
    action.add_argument(
        "--check", action="store_true", help="with --write: only compare, exit 2 on a difference"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print, write or submit; gives 0, or with ``--wait`` the exit code of the job."""
    from launcher import submission
    from launcher.slurm import render
    from launcher.slurm_examples import write_examples
    from models.errors import UserError

    if arguments.write:
        return write_examples(arguments.write, check=arguments.check)
    if not arguments.config:
        raise UserError("--config is missing: the DeepSpeed configuration to train with")
    job = submission.job_from_arguments(arguments)
    submission.check(job, arguments)
    script = render(job, command=shlex.join(["vlfit", "submit", "--config", arguments.config]))
    if arguments.dry_run:
        print(script, end="")
        return 0
    job_id = submission.submit(script)
    log = submission.log_path(job, job_id)
    print(f"job {job_id}: log {log}, one log per rank in {log.with_suffix('')}/")
    return submission.follow(job_id, log) if arguments.wait else 0
