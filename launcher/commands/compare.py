"""``vlfit compare``: run several configs for real and set their memory and speed side by side."""

import argparse

HELP = "run several configs for real, one after the other, and compare memory, speed and loss"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vlfit compare``."""
    parser.add_argument(
        "--config", nargs="+", required=True, metavar="JSON", help="configs; the first is the baseline"
    )
    parser.add_argument(
        "--model", default="demo", metavar="SPEC", help="model spec: a file or a name (default demo)"
    )
    parser.add_argument("--data", metavar="STORE", help="data store (default: the demo's)")
    parser.add_argument(
        "--steps", type=int, default=8, metavar="N", help="optimizer steps of each run (default 8)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of weights, order and dropout")
    parser.add_argument("--partition", metavar="YAML", help="partition file for every run")
    parser.add_argument(
        "--output", metavar="DIR", help="folder for the run directories (default runs/compare-TIME)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Run and print."""
    from launcher.compare import compare, print_table
    from launcher.quiet import import_deepspeed

    import_deepspeed()
    return print_table(compare(arguments), as_json=arguments.json)
