"""``vlfit estimate``: predicted peak memory and step time of one given plan."""

import argparse

HELP = "predict the memory and step time of one plan: a DeepSpeed JSON, with or without a partition"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vlfit estimate``."""
    parser.add_argument("--config", required=True, metavar="JSON", help="DeepSpeed config")
    parser.add_argument("--model", required=True, metavar="SPEC", help="model spec: a file or a name")
    parser.add_argument("--partition", metavar="YAML", help="partition file")
    parser.add_argument(
        "--pipeline", choices=("fairscale", "deepspeed"), help="engine of a partition with stages"
    )
    parser.add_argument(
        "--gpu", default="cpu", metavar="NAME", help="a name of launcher/hardware.yaml (default cpu)"
    )
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of a GPU, where it is another")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="default: all on one node, up to 8")
    parser.add_argument("--plot", metavar="FILE", help="draw memory over a step (PNG)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Predict and print."""
    from launcher.estimate import estimate
    from launcher.plan_tables import print_explanation, print_json
    from launcher.quiet import import_deepspeed
    from models.errors import UserError

    for name in ("world_size", "gpus_per_node"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: at least 1 is needed")
    if arguments.memory is not None and not 0 < arguments.memory < float("inf"):
        raise UserError(f"--memory {arguments.memory:g}: a number above 0 is needed")
    import_deepspeed()
    planned, capacity_bytes = estimate(arguments)
    if arguments.json:
        print_json(planned.as_json())
    else:
        print_explanation(planned)
    if arguments.plot:
        from launcher.plots import draw_memory

        draw_memory(planned.prediction, arguments.plot, limit_bytes=capacity_bytes, title=arguments.model)
    return 0
