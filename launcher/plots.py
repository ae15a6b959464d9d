"""Pictures: memory over a step stacked by category, and a run's loss and throughput. PNG by matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.memory.prediction import CATEGORIES, DevicePrediction, Prediction
from models.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30
_COLOURS = dict(
    zip(
        CATEGORIES,
        (
            "#1f4e79", "#3b7dbd", "#8ab6dd", "#5a9a6f", "#e08e3c",
            "#f4c27a", "#9d6fb0", "#bcbcbc", "#c8554f", "#7f7f7f",
        ),
        strict=True,
    )
)  # fmt: skip
"""Cold: what stays. Warm: what a micro-batch makes."""
_DEVICES_MAX = 4


def draw_memory(
    prediction: Prediction,
    path: str | Path,
    *,
    limit_bytes: int | None = None,
    title: str = "",
) -> None:
    """Draw each device's predicted memory over load, one step, evaluation and save."""
    devices = sorted(prediction.devices, key=lambda device: -device.needed_bytes)[:_DEVICES_MAX]
    figure, axes = _figure(len(devices), height=3.4)
    for axis, device in zip(axes, devices, strict=True):
        stack_memory(axis, device, limit_bytes=limit_bytes)
        axis.set_title(
            f"{title} on {device.device}: peak {_size(device.peak_bytes)}", loc="left", fontsize=10
        )
    _save(figure, path)


def draw_run(
    metrics: Sequence[dict[str, Any]],
    path: str | Path,
    *,
    title: str,
    prediction: Prediction | None = None,
    measured_bytes: int | None = None,
    limit_bytes: int | None = None,
) -> None:
    """Draw a run: loss and throughput by step, and the predicted memory beside the measured peak."""
    figure, axes = _figure(3 if prediction else 2, height=2.8)
    steps = [line["step"] for line in metrics]
    names = list(metrics[0].get("losses") or {})
    axes[0].plot(steps, [line["loss"] for line in metrics], color="#1f4e79", linewidth=1.6, label="loss")
    for name, colour in zip(names, ("#e08e3c", "#5a9a6f", "#9d6fb0"), strict=False):
        values = [float((line.get("losses") or {}).get(name, "nan")) for line in metrics]
        axes[0].plot(steps, values, color=colour, linewidth=0.9, alpha=0.8, label=name)
    axes[0].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)
    axes[0].set_ylabel("loss")
    axes[0].set_ylim(bottom=0)
    axes[0].set_title(title, loc="left", fontsize=10)
    axes[1].plot(steps, [line["samples_per_second"] for line in metrics], color="#5a9a6f", linewidth=1.2)
    axes[1].set_ylabel("samples/s")
    axes[1].set_ylim(bottom=0)
    axes[1].set_xlabel("optimizer step")
    for axis in axes[:2]:
        axis.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    if prediction:
        worst = prediction.worst
        stack_memory(axes[2], worst, limit_bytes=limit_bytes, measured_bytes=measured_bytes)
        said = f"predicted {_size(worst.peak_bytes)}" + (
            f", measured {_size(measured_bytes)}" if measured_bytes else ""
        )
        axes[2].set_title(f"memory on {worst.device}: {said}", loc="left", fontsize=10)
    _save(figure, path)


def stack_memory(
    axis: "Axes",
    device: DevicePrediction,
    *,
    limit_bytes: int | None = None,
    measured_bytes: int | None = None,
) -> None:
    """Stack the high-water marks of the timeline by category; a limit far above is said, not drawn."""
    moments = device.timeline
    top = device.peak_bytes
    unit, name = (GIB, "GiB") if top >= GIB else (2**20, "MiB")
    edges = _edges(device)
    base = [0.0] * len(moments)
    for category in CATEGORIES:
        values = [moment.items.get(category, 0) / unit for moment in moments]
        if not any(values):
            continue
        upper = [low + value for low, value in zip(base, values, strict=True)]
        axis.stairs(
            upper, edges, baseline=base, fill=True, color=_COLOURS[category], label=category, linewidth=0
        )
        base = upper
    peak = max(range(len(moments)), key=lambda index: moments[index].total_bytes)
    axis.plot(
        (edges[peak] + edges[peak + 1]) / 2,
        top / unit,
        marker="v",
        color="black",
        markersize=5,
        clip_on=False,
    )
    highest = top
    if measured_bytes:
        axis.axhline(
            measured_bytes / unit, color="black", linewidth=1.2, linestyle=":", label="measured peak"
        )
        highest = max(highest, measured_bytes)
    if limit_bytes and limit_bytes <= 2.5 * top:
        axis.axhline(limit_bytes / unit, color="#b00020", linewidth=1.5, linestyle="--", label="limit")
        highest = max(highest, limit_bytes)
    elif limit_bytes:
        axis.text(
            0.995, 0.96, f"limit {_size(limit_bytes)}", transform=axis.transAxes, ha="right", va="top",
            color="#b00020", fontsize=8,
        )  # fmt: skip
    axis.set_ylim(0, 1.12 * highest / unit)
    axis.set_xlim(0, edges[-1])
    axis.set_ylabel(name)
    _mark_phases(axis, device, edges)
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False, reverse=True)


def _edges(device: DevicePrediction) -> list[float]:
    """Where each moment begins and ends on the axis: layers are narrow, what is not a layer's is wide enough to see."""
    layers = sum(moment.phase in ("forward", "backward") for moment in device.timeline)
    edges = [0.0]
    for moment in device.timeline:
        edges.append(edges[-1] + (1 if moment.phase in ("forward", "backward") else max(1, layers / 30)))
    return edges


def _mark_phases(axis: "Axes", device: DevicePrediction, edges: Sequence[float]) -> None:
    """Name stretches of one phase below the axis, where there is room, and part them by thin lines."""
    phases = [moment.phase for moment in device.timeline]
    starts = [index for index in range(len(phases)) if not index or phases[index - 1] != phases[index]]
    labels, places, room = [], [], 0.0
    for start, end in zip(starts, [*starts[1:], len(phases)], strict=True):
        if start:
            axis.axvline(edges[start], color="white", linewidth=0.8, alpha=0.7)
        middle, half = (edges[start] + edges[end]) / 2, 0.0045 * edges[-1] * len(phases[start])
        if middle - half >= room - 0.01 * edges[-1]:
            labels.append(phases[start])
            places.append(middle)
            room = middle + half
    axis.set_xticks(places, labels, fontsize=8)
    axis.tick_params(axis="x", length=0)


def _figure(rows: int, height: float) -> tuple[Any, list["Axes"]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        rows, 1, figsize=(10.5, height * rows), squeeze=False, layout="constrained"
    )
    axes = [row[0] for row in grid]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e4e4e4", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: str | Path) -> None:
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB else f"{size_bytes / 2**20:.0f} MiB"
