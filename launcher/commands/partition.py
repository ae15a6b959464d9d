"""``vlfit partition``: write a balanced partition file."""

import argparse

HELP = "split a model into balanced pipeline stages and write the partition file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vlfit partition``."""
    parser.add_argument("--model", metavar="SPEC", help="model spec: a file or a name of models/specs/")
    parser.add_argument("--stages", type=int, metavar="N", help="number of stages")
    parser.add_argument(
        "--by",
        choices=("time", "memory", "parameters"),
        default="time",
        help="what to balance: time by FLOPs (default), memory of weights and activations, or parameters",
    )
    parser.add_argument("--output", metavar="YAML", help="file to write (default: print it)")
    parser.add_argument("--write", action="store_true", help="regenerate models/partitions/ instead")


def run(arguments: argparse.Namespace) -> int:
    """Write, or print."""
    from launcher.partitions import balanced, write_all
    from models.errors import UserError
    from models.spec import load_spec

    if arguments.write:
        for path in write_all():
            print(path.name)
        return 0
    if not arguments.model or not arguments.stages:
        raise UserError("give --model SPEC and --stages N, or --write")
    partition = balanced(load_spec(arguments.model), arguments.stages, arguments.by)
    if arguments.output:
        made_by = f"vlfit partition --model {arguments.model} --stages {arguments.stages} --by {arguments.by}"
        partition.save(arguments.output, made_by=made_by)
    else:
        print(partition.dump_yaml(), end="")
    return 0
