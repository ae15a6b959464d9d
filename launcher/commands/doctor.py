"""``vlfit doctor``: what this machine has, what is missing, and how to mend it."""

import argparse

HELP = "show versions, devices, precision support, compilers and shared memory, and what is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vlfit doctor``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--nodes",
        action="store_true",
        help="compare all nodes and test their network; start it as a run: srun, torchrun or deepspeed",
    )
    # deepspeed adds it
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Check and print; exit code 2 if something that training needs is missing, or a node is not like the others."""
    from launcher.doctor import examine, print_report
    from launcher.quiet import import_deepspeed

    import_deepspeed()
    if arguments.nodes:
        from launcher.preflight import run_alone

        return run_alone()
    return print_report(examine(), as_json=arguments.json)
