"""``vlfit launch``: starts train.py on this node or many, and answers for all that it starts."""

import argparse

from launcher.options import add_train_options

HELP = "train on this node, or on the hosts of a hostfile, through deepspeed or torchrun"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command and every one of train.py."""
    add_train_options(parser)
    where = parser.add_argument_group("where")
    where.add_argument("--launcher", choices=("deepspeed", "torchrun"), help="default: deepspeed")
    where.add_argument("--gpus", "--num_gpus", type=int, metavar="G", help="GPUs of a node to use")
    where.add_argument("--processes", type=int, metavar="N", help="ranks per node (default: by the plan)")
    where.add_argument("--hostfile", metavar="FILE", help="lines of: NAME slots=N")
    where.add_argument("--nodes", "--num_nodes", type=int, default=1, metavar="N")
    where.add_argument("--no_ssh", "--no-ssh", action="store_true", help="run this on every node yourself")
    where.add_argument("--node_rank", "--node-rank", type=int, metavar="R", help="with --no_ssh or torchrun")
    where.add_argument("--master_addr", "--master-addr", metavar="ADDRESS", help="of the first node")
    where.add_argument("--master_port", "--master-port", type=int, metavar="PORT", help="default: a free one")
    where.add_argument("--ssh_port", "--ssh-port", type=int, metavar="PORT")
    where.add_argument(
        "--save-seconds", type=float, default=120, metavar="S", help="time to save on a signal"
    )
    where.add_argument(
        "--straggler-seconds",
        type=float,
        default=60,
        metavar="S",
        help="end all hosts this long after the first ended",
    )
    where.add_argument("--dry-run", action="store_true", help="print the exact command, start nothing")


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks; gives their exit code (75: saved after a signal)."""
    from launcher.launch import run_launch

    return run_launch(arguments)
