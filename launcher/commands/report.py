"""``vlfit report``: runs side by side, and a picture of each."""

import argparse

HELP = "show what runs cost and reached, predicted beside measured, and draw each as a picture"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vlfit report``."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories (train.py: --output)")
    parser.add_argument("--plot", metavar="FILE", help="where to draw, for one run (default RUN/report.png)")
    parser.add_argument("--no-plot", action="store_true", help="draw nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; draw each run."""
    import sys
    from pathlib import Path

    from launcher.quiet import import_deepspeed
    from launcher.report import PICTURE, draw, print_runs, read_run
    from models.errors import UserError

    if arguments.plot and len(arguments.runs) > 1:
        raise UserError(
            "--plot names one file, but there are several runs; each is drawn as RUN/report.png without it"
        )
    found = {run: read_run(run) for run in arguments.runs}
    print_runs([(run, summary) for run, (summary, _) in found.items()], arguments.json)
    if arguments.no_plot:
        return 0
    import_deepspeed()
    for run, (summary, metrics) in found.items():
        path = Path(arguments.plot or Path(run) / PICTURE)
        draw(run, path, summary, metrics)
        print(f"drew {path}", file=sys.stderr)
    return 0
