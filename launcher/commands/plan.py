"""``vlfit plan``: find the fastest way to train that fits, before any GPU is touched."""

import argparse
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.memory.hardware import Hardware
    from launcher.memory.planned import Answer
    from models.spec import ModelSpec

HELP = "find the fastest way to train a model that fits in the memory of given GPUs, and write its files"

PRECISIONS = ("fp32", "fp16", "bf16", "autocast-fp16", "autocast-bf16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vlfit plan``."""
    parser.add_argument(
        "--model", required=True, metavar="SPEC", help="model spec: a file or a name of models/specs/"
    )
    parser.add_argument(
        "--gpu", required=True, metavar="NAME", help="a name of launcher/hardware.yaml, or cpu"
    )
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of a GPU, where it is another")
    parser.add_argument("--host-memory", type=float, metavar="GIB", help="memory of a node, for offloading")
    parser.add_argument(
        "--network", type=float, metavar="GBIT", help="network of a node in Gbit/s, all adapters"
    )
    parser.add_argument("--gpus-per-node", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument(
        "--nodes",
        default="1",
        metavar="M",
        help="default 1; a list such as 1,2,4 shows how the best plan scales",
    )
    parser.add_argument(
        "--global-batch", type=int, required=True, metavar="B", help="rows of an optimizer step"
    )
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, help="search only these")
    parser.add_argument(
        "--margin",
        type=float,
        default=0.05,
        metavar="F",
        help="share of the memory to leave free (default 0.05)",
    )
    parser.add_argument(
        "--write", metavar="DIR", help="write config.json, partition.yaml and job.sbatch there"
    )
    parser.add_argument(
        "--explain", action="store_true", help="show what the peak of the best plan consists of"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the best plan's memory over a step (PNG)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Search, print, write. Exit code 4 where nothing fits."""
    from launcher.plan_tables import nearest_line, print_answer, print_explanation, print_json
    from models.errors import DoesNotFit, UserError
    from models.spec import load_spec

    nodes = _nodes(arguments.nodes)
    _check(arguments)
    spec = load_spec(arguments.model)
    hardware = _hardware(arguments)
    if len(nodes) > 1:
        if arguments.write or arguments.plot or arguments.explain:
            raise UserError(
                "--nodes with several counts only compares them; --write, --plot, --explain need one"
            )
        return _scale(arguments, spec, hardware, nodes)
    _check_batch(arguments.global_batch, nodes[0] * arguments.gpus_per_node)
    answer = find(arguments, spec, hardware, nodes[0])
    if arguments.json:
        print_json(answer.as_json())
    else:
        print_answer(answer, spec.name, hardware, nodes[0], arguments.gpus_per_node)
    if answer.best is None:
        raise DoesNotFit(nearest_line(answer, hardware))
    if arguments.explain and not arguments.json:
        print_explanation(answer.best)
    if arguments.plot:
        from launcher.plots import draw_memory

        draw_memory(
            answer.best.prediction, arguments.plot, limit_bytes=hardware.memory_bytes, title=spec.name
        )
    if arguments.write:
        _write(arguments, spec, answer, nodes[0])
    return 0


def find(arguments: argparse.Namespace, spec: "ModelSpec", hardware: "Hardware", nodes: int) -> "Answer":
    """Search; a search asked for again comes from the cache."""
    from dataclasses import asdict

    from launcher.memory.cache import cached
    from launcher.memory.planned import Answer

    precisions = tuple(arguments.precision or hardware.precisions)
    for precision in precisions:
        hardware.flops(precision)

    def look() -> dict:
        from launcher.memory.search import search
        from launcher.memory.timing import Cluster

        cluster = Cluster(hardware, nodes, arguments.gpus_per_node)
        return search(
            spec, cluster, arguments.global_batch, margin=arguments.margin, precisions=precisions
        ).dump()

    key = {
        "spec": spec.model_dump(mode="json"),
        "hardware": asdict(hardware),
        "nodes": nodes,
        "per_node": arguments.gpus_per_node,
        "global_batch": arguments.global_batch,
        "margin": arguments.margin,
        "precisions": precisions,
    }
    return Answer.load(cached("plans", key, look))


def _scale(arguments: argparse.Namespace, spec: "ModelSpec", hardware: "Hardware", nodes: list[int]) -> int:
    """The same global batch on more and more nodes."""
    from launcher.plan_tables import print_json, print_scaling, scaling_rows
    from models.errors import DoesNotFit

    fitting = [count for count in nodes if arguments.global_batch % (count * arguments.gpus_per_node) == 0]
    if not fitting:
        _check_batch(arguments.global_batch, nodes[0] * arguments.gpus_per_node)
    answers = {count: find(arguments, spec, hardware, count) for count in fitting}
    rows = scaling_rows(answers, nodes, arguments.gpus_per_node)
    if arguments.json:
        print_json({"nodes": rows})
    else:
        print_scaling(rows, spec.name, hardware, arguments.gpus_per_node, arguments.global_batch)
    if not any(answer.best for answer in answers.values()):
        raise DoesNotFit(
            f"{spec.name} fits on none of these numbers of nodes; `--nodes {fitting[-1]}` says why"
        )
    return 0


def _write(arguments: argparse.Namespace, spec: "ModelSpec", answer: "Answer", nodes: int) -> None:
    import sys
    from pathlib import Path

    from launcher.memory.plan_files import train_command, write_plan
    from launcher.memory.search import strategy_of
    from models.errors import UserError

    assert answer.best is not None
    strategy = strategy_of(spec, answer.best.choices)
    words = ["vlfit", "plan", "--model", arguments.model, "--gpu", arguments.gpu]
    words += ["--gpus-per-node", str(arguments.gpus_per_node), "--nodes", str(nodes)]
    words += ["--global-batch", str(arguments.global_batch)]
    words += ["--memory", f"{arguments.memory:g}"] if arguments.memory else []
    folder = Path(arguments.write)
    try:
        files = write_plan(
            strategy,
            folder,
            model=arguments.model,
            nodes=nodes,
            per_node=arguments.gpus_per_node,
            command=shlex.join(words),
        )
    except OSError as error:
        raise UserError(f"--write {folder}: {error.strerror}") from None
    print(f"wrote {', '.join(map(str, files))}", file=sys.stderr)
    print(f"train: {train_command(folder, arguments.model, strategy)}", file=sys.stderr)


def _nodes(text: str) -> list[int]:
    from models.errors import UserError

    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--nodes {text}: a number, or a list such as 1,2,4, is needed") from None
    if min(found) < 1 or len(set(found)) < len(found):
        raise UserError(f"--nodes {text}: numbers of at least 1 are needed, each once")
    return found


def _check(arguments: argparse.Namespace) -> None:
    from models.errors import UserError

    for name in ("gpus_per_node", "global_batch"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: at least 1 is needed")
    for name in ("memory", "host_memory", "network"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} {value:g}: a number above 0 is needed")
    if not 0 <= arguments.margin < 1:
        raise UserError(f"--margin {arguments.margin:g}: a share from 0 to below 1 is needed, such as 0.05")


def _check_batch(batch: int, devices: int) -> None:
    from models.errors import UserError

    if batch % devices:
        below = batch // devices * devices
        nearest = below if below and batch - below <= devices / 2 else below + devices
        raise UserError(
            f"--global-batch {batch} cannot be split over {devices} device(s); the nearest that can is {nearest}"
        )


def _hardware(arguments: argparse.Namespace) -> "Hardware":
    from dataclasses import replace

    from launcher.memory.hardware import find_hardware

    hardware = find_hardware(arguments.gpu, arguments.gpus_per_node)
    if arguments.memory:
        hardware = hardware.with_memory(arguments.memory)
    if arguments.host_memory:
        hardware = replace(hardware, host_memory_bytes=round(arguments.host_memory * 2**30))
    if arguments.network:
        hardware = replace(hardware, network_bandwidth=arguments.network / 8 * 1e9)
    return hardware
