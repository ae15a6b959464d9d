"""What ``vlfit plan`` and ``vlfit estimate`` print: tables for people, JSON for programs."""

import itertools
import json
from typing import TYPE_CHECKING, Any

from launcher.memory.planned import Answer, Planned
from launcher.memory.prediction import CATEGORIES

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.memory.hardware import Hardware

GIB = 2**30


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON document."""
    print(json.dumps(data, indent=1))


def print_answer(answer: Answer, model: str, hardware: "Hardware", nodes: int, per_node: int) -> None:
    """Print the best plans, and the nearest that do not fit."""
    console = _console()
    places = f"{nodes} node{'s' * (nodes > 1)} × {per_node} {hardware.name}"
    console.print(
        f"{model} on {places}: {answer.plans_searched} plans searched, {answer.predicted} of them simulated"
    )
    if answer.plans:
        limit = answer.plans[0].limit_bytes
        console.print(
            f"\nthe fastest that fit in {limit / GIB:.1f} GiB ({hardware.memory_bytes / GIB:.1f} less margin)"
        )
        console.print(_table(answer.plans, missing=False))
    if answer.nearest_misses:
        console.print("\nthe nearest that do not fit" + (", all of them faster" if answer.plans else ""))
        console.print(_table(answer.nearest_misses, missing=True))
    if hardware.device_type == "cuda":
        console.print("\npredicted, not measured; `vlfit compare` measures", style="dim")


def nearest_line(answer: Answer, hardware: "Hardware") -> str:
    """Where nothing fits: what is nearest, and what would have to change."""
    nearest = answer.nearest_misses[0]
    choices = nearest.choices
    share = nearest.limit_bytes / hardware.memory_bytes
    line = f"nothing fits: {_way(nearest)} with {choices['micro_batch_size']} rows is nearest"
    if nearest.needed_bytes > nearest.limit_bytes:
        return (
            f"{line} and needs {nearest.needed_bytes / GIB:.2f} GiB of {nearest.limit_bytes / GIB:.2f}; it takes "
            f"{nearest.needed_bytes / share / GIB:.1f} GiB per device, more devices, or a smaller model"
        )
    return (
        f"{line} and needs {nearest.host_bytes / GIB:.0f} GiB of host memory per node, "
        f"{nearest.over_bytes / GIB:.0f} too many; it takes more nodes, or --host-memory if there is more"
    )


def print_explanation(plan: Planned) -> None:
    """Print each device's peak by category, and the step's time by part."""
    from rich.table import Table

    console = _console()
    choices = plan.choices
    console.print(
        f"\n{_way(plan)}: {choices['micro_batch_size']} rows × {choices['accumulation_steps']} accumulation × "
        f"{choices['data_parallel']} replicas; recomputed: {choices['recompute']}"
    )
    devices = plan.prediction.devices
    table = Table(title="peak, MiB", title_justify="left")
    table.add_column("")
    for device in devices:
        table.add_column(device.device, justify="right")
    for category in CATEGORIES:
        row = [device.peak.items.get(category, 0) for device in devices]
        if any(row):
            table.add_row(category, *(f"{value / 2**20:,.1f}" for value in row))
    table.add_section()
    table.add_row("allocated", *(f"{device.peak_bytes / 2**20:,.1f}" for device in devices), style="bold")
    table.add_row("reached in", *(f"{device.peak.phase} {device.peak.where}" for device in devices))
    if any(device.reserved_bytes is not None for device in devices):
        table.add_row("reserved", *(f"{(device.reserved_bytes or 0) / 2**20:,.1f}" for device in devices))
    if any(device.context_bytes for device in devices):
        table.add_row("context", *(f"{device.context_bytes / 2**20:,.1f}" for device in devices))
    table.add_row("needed", *(f"{device.needed_bytes / 2**20:,.1f}" for device in devices))
    if any(device.host_bytes for device in devices):
        table.add_row("host memory", *(f"{device.host_bytes / 2**20:,.1f}" for device in devices))
    console.print(table)
    limit = plan.limit_bytes / 2**20
    verdict = f"{plan.over_bytes / 2**20:,.1f} MiB too many" if plan.over_bytes else "fits"
    console.print(f"limit {limit:,.1f} MiB: {verdict}")
    parts = ", ".join(f"{name} {value:.4f}" for name, value in plan.step.items() if value >= 5e-5)
    console.print(f"step {plan.step_seconds:.4f} s: {parts}")


def scaling_rows(answers: dict[int, Answer], nodes: list[int], per_node: int) -> list[dict[str, Any]]:
    """For each number of nodes: the best plan's step time and memory, and efficiency against the first that fits."""
    rows: list[dict[str, Any]] = []
    first: tuple[int, float] | None = None
    for count in nodes:
        answer = answers.get(count)
        best = answer.best if answer else None
        row: dict[str, Any] = {"nodes": count, "devices": count * per_node, "divides": answer is not None}
        if best:
            first = first or (count, best.step_seconds)
            row |= {
                "efficiency": round(first[0] * first[1] / (count * best.step_seconds), 4),
                "best": best.as_json(),
            }
        rows.append(row)
    return rows


def print_scaling(
    rows: list[dict[str, Any]], model: str, hardware: "Hardware", per_node: int, global_batch: int
) -> None:
    """Print ``scaling_rows`` with the network model that they hold for."""
    from rich.table import Table

    console = _console()
    console.print(f"{model}, global batch {global_batch}, on nodes of {per_node} {hardware.name}")
    table = Table()
    for heading in ("nodes", "devices", "s/step", "samples/s", "efficiency", "GiB", "the best plan"):
        table.add_column(heading, justify="left" if heading == "the best plan" else "right")
    for row in rows:
        cells = [str(row["nodes"]), str(row["devices"])]
        if not row["divides"]:
            table.add_row(*cells, "–", "–", "–", "–", "the global batch cannot be split over so many")
        elif "best" not in row:
            table.add_row(*cells, "–", "–", "–", "–", "nothing fits")
        else:
            best = row["best"]
            needed = max(best["needed_bytes"].values()) / GIB
            cells += [f"{best['step_seconds']:.3f}", f"{best['samples_per_second']:.0f}"]
            cells += [f"{100 * row['efficiency']:.0f} %", f"{needed:.1f}"]
            rows_text = f"{best['micro_batch_size']} rows × {best['accumulation_steps']}"
            table.add_row(*cells, f"{best['engine']} {best['precision']} ZeRO {best['zero']}, {rows_text}")
    console.print(table)
    console.print(
        f"network model: rings; {hardware.link_bandwidth / 1e9:.1f} GB/s between devices of a node, "
        f"{hardware.network_bandwidth / 1e9:.1f} GB/s per node, {hardware.latency_seconds * 1e6:.0f} µs a hop; "
        "efficiency against the smallest number of nodes that fits"
    )


def _table(plans: tuple[Planned, ...], missing: bool) -> Any:
    from rich.table import Table

    table = Table()
    headings = [
        "engine",
        "precision",
        "ZeRO",
        "stages",
        "rows × steps",
        "recompute",
        "s/step",
        "samples/s",
        "GiB",
    ]
    for heading in [*headings, *(["too many"] if missing else [])]:
        right = heading in ("s/step", "samples/s", "GiB", "too many")
        table.add_column(heading, justify="right" if right else "left")
    for plan in plans:
        choices = plan.choices
        chunks = f" in {choices['chunks']}" if choices["chunks"] > 1 else ""
        cells = [
            choices["engine"],
            choices["precision"],
            choices["zero"],
            _stages(choices),
            f"{choices['micro_batch_size']}{chunks} × {choices['accumulation_steps']}",
            _recomputed(choices),
            f"{plan.step_seconds:.3f}",
            f"{choices['global_batch_size'] / plan.step_seconds:.0f}",
            f"{plan.needed_bytes / GIB:.2f}",
        ]
        table.add_row(*cells, *([f"{plan.over_bytes / GIB:.2f}"] if missing else []))
    return table


def _stages(choices: dict[str, Any]) -> str:
    bounds = choices["bounds"]
    sizes = [str(end - first) for first, end in itertools.pairwise(bounds)]
    return f"{choices['stages']}: {'+'.join(sizes)}" if sizes else "1"


def _recomputed(choices: dict[str, Any]) -> str:
    label, count = choices["recompute"], len(choices["recomputed_layers"])
    return f"{label}: {count}" if label == "optimal" else label


def _way(plan: Planned) -> str:
    choices = plan.choices
    stages = f", {choices['stages']} stages" if choices["stages"] > 1 else ""
    return f"{choices['engine']} {choices['precision']} ZeRO {choices['zero']}{stages}"


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False)
    # In a log there is no terminal to fit into.
    return console if console.is_terminal else Console(width=120, highlight=False)
