"""``vlfit export``: the weights of a run for transformers and timm."""

import argparse
from pathlib import Path

HELP = "write a run's weights for transformers.BertModel, timm and safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("source", metavar="RUN", help="run directory, or one of its checkpoints")
    parser.add_argument("out", metavar="OUT", help="folder to make")


def run(arguments: argparse.Namespace) -> int:
    """Export and say from which checkpoint."""
    from launcher.export import export

    checkpoint = export(Path(arguments.source), Path(arguments.out))
    print(f"exported {checkpoint} to {arguments.out}")
    return 0
