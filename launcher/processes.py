"""How many processes a plan needs on a node, and how many of them are data-parallel.

                    one process drives   processes on G GPUs   replicas among W processes
ZeRO, no stages     1 GPU                G                     W
FairScale Pipe      a GPU per stage      G / stages            W
DeepSpeed pipeline  1 GPU, one stage     G                     W / stages
"""

import argparse
from pathlib import Path

from models.errors import UserError


def stages_of(partition: str | None) -> int:
    """Number of stages of a partition file (1 without one); train.py checks the rest of the file."""
    if partition is None:
        return 1
    import yaml

    try:
        stages = (yaml.safe_load(Path(partition).read_text(encoding="utf-8")) or {}).get("stages")
    except OSError as error:
        raise UserError(f"{partition}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, AttributeError, UnicodeDecodeError):
        raise UserError(f"{partition}: not a partition file") from None
    if not isinstance(stages, list) or not stages:
        raise UserError(f"{partition}: stages: a list of at least one stage is needed")
    return len(stages)


def gpus_per_process(arguments: argparse.Namespace) -> int:
    """GPUs that one process drives under the plan of train.py's options."""
    return 1 if arguments.pipeline == "deepspeed" else stages_of(arguments.partition)


def processes_per_node(arguments: argparse.Namespace, gpus: int) -> int:
    """Processes that use all ``gpus`` of a node under the plan of train.py's options; one without GPUs."""
    stages = stages_of(arguments.partition)
    if gpus == 0 or stages == 1 or arguments.pipeline == "deepspeed":
        return max(gpus, 1)
    if gpus % stages:
        raise UserError(
            f"{arguments.partition}: {stages} stages need {stages} GPUs per process, which do not divide the "
            f"{gpus} GPU(s) of a node"
        )
    return gpus // stages


def data_parallel_size(arguments: argparse.Namespace, world_size: int) -> int:
    """Replicas among which a global batch is split."""
    if arguments.pipeline != "deepspeed":
        return world_size
    stages = stages_of(arguments.partition)
    if world_size % stages:
        raise UserError(
            f"{arguments.partition}: {stages} stages of the deepspeed pipeline do not divide "
            f"{world_size} processes"
        )
    return world_size // stages
