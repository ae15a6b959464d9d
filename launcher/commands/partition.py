"""``vlfit partition``: write a balanced partition file."""

import argparse
import sys
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from models.partition import PartitionSpec
    from models.spec import ModelSpec

HELP = "split a model into balanced pipeline stages and write the partition file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vlfit partition``."""
    parser.add_argument("--model", metavar="SPEC", help="model spec: a file or a name of models/specs/")
    parser.add_argument("--stages", type=int, metavar="N", help="number of stages")
    parser.add_argument(
        "--by",
        choices=("time", "memory", "parameters"),
        default="time",
        help="what to balance: time of forward and backward (default), memory of weights and activations, "
        "or parameters",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu", "flops"),
        help="where to measure time (default: cuda where there is one); flops: count, for a device that is not here",
    )
    parser.add_argument("--output", metavar="YAML", help="file to write (default: print it)")
    parser.add_argument(
        "--write", action="store_true", help="regenerate models/partitions/, by flops, instead"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write, or print; what each stage costs goes to standard error."""
    from launcher.partitions import balanced, write_all
    from models.build import layer_names
    from models.errors import UserError
    from models.spec import load_spec

    if arguments.write:
        for path in write_all():
            print(path.name)
        return 0
    if not arguments.model or arguments.stages is None:
        raise UserError("give --model SPEC and --stages N, or --write")
    spec = load_spec(arguments.model)
    names = layer_names(spec)
    if not 1 <= arguments.stages <= len(names):
        raise UserError(
            f"--stages {arguments.stages}: {spec.name} has {len(names)} layers; give 1 to {len(names)} stages"
        )
    device = _device(arguments.device) if arguments.by == "time" else None
    costs = _costs(spec, arguments.by, device)
    partition = balanced(spec, arguments.stages, costs)
    print(f"balanced by {arguments.by}{f' ({device})' if device else ''}", file=sys.stderr)
    _report(partition, names, costs)
    if arguments.output:
        made_by = f"vlfit partition --model {arguments.model} --stages {arguments.stages} --by {arguments.by}"
        partition.save(arguments.output, made_by=made_by + (f" --device {device}" if device else ""))
    else:
        print(partition.dump_yaml(), end="")
    return 0


def _device(wanted: str | None) -> str:
    """Where time is measured, or ``flops``."""
    import torch

    from models.errors import UserError

    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; use cpu, or flops to count")
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")


def _costs(spec: "ModelSpec", by: Literal["time", "memory", "parameters"], device: str | None) -> list[float]:
    """Each layer's cost: measured on the device, or from shapes alone."""
    import torch

    from models.balance import layer_costs, timed_costs
    from models.build import build_layers

    if by == "time" and device != "flops":
        return timed_costs(spec, build_layers(spec.without_weights()), torch.device(device or "cpu"))
    return layer_costs(spec, build_layers(spec, device="meta"), "flops" if by == "time" else by)


def _report(partition: "PartitionSpec", names: list[str], costs: list[float]) -> None:
    bounds = partition.bounds_of(names)
    for stage, first, end in zip(partition.stages, bounds, bounds[1:], strict=False):
        share = 100 * sum(costs[first:end]) / sum(costs)
        print(f"{stage.name}: {names[first]} to {names[end - 1]}, {share:.1f} % of the cost", file=sys.stderr)
