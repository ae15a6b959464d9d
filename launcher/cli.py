"""The ``vlfit`` command.

Each command is one module of ``launcher.commands`` with three names: ``HELP`` (one line),
``add_arguments(parser)`` and ``run(arguments) -> exit code``. At module level a command imports only
the standard library, so that ``vlfit --help`` never waits for torch; ``run`` imports what it needs.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = (
    "compare",
    "config",
    "data",
    "doctor",
    "estimate",
    "export",
    "jobs",
    "launch",
    "partition",
    "plan",
    "report",
    "submit",
)


def build_parser() -> argparse.ArgumentParser:
    """Give the parser of all commands; imports no heavy library."""
    parser = argparse.ArgumentParser(
        prog="vlfit", description="Makes vision-language training fit in the memory you have."
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an expected error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"launcher.commands.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code of the design (0, 2, 3, 4 or 75)."""
    from launcher.umask import keep_others_from_writing
    from models.errors import UserError

    keep_others_from_writing()
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except UserError as error:
        if arguments.debug:
            raise
        print(f"vlfit {arguments.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
