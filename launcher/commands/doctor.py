"""``vlfit doctor``: what this machine has, what is missing, and how to mend it."""

import argparse

HELP = "show versions, devices, precision support, compilers and shared memory, and what is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vlfit doctor``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Check and print; exit code 2 if something that training needs is missing."""
    from launcher.doctor import examine, print_report
    from launcher.quiet import import_deepspeed

    import_deepspeed()
    return print_report(examine(), as_json=arguments.json)
