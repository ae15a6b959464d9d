"""The end of a run in numbers and words: the parts of ``summary.json``, and the last lines on the console."""

from pathlib import Path
from typing import Any


def versions() -> dict[str, str]:
    """Give the versions of what computes."""
    from importlib.metadata import version

    names = ("vlfit", "torch", "deepspeed", "fairscale", "transformers", "timm")
    return {name: version(name) for name in names}


def largest_by_device(by_rank: list[dict[str, int]]) -> dict[str, int]:
    """The largest peak of each device. On the CPU every rank is a device of its own."""
    merged: dict[str, int] = {}
    for found in by_rank:
        for device, value in found.items():
            merged[device] = max(merged.get(device, 0), value)
    return merged


def sum_counts(counts: list[dict[str, int]]) -> dict[str, int]:
    """The sum of each count over the steps."""
    return {name: sum(count[name] for count in counts) for name in counts[0]} if counts else {}


def evaluation_line(step: int, metrics: dict[str, float]) -> str:
    """What one evaluation found."""
    line = (
        f"evaluation after step {step}: loss {metrics['loss']:.3f} on {metrics['samples']} held-out samples"
    )
    if "image_to_text_r1" in metrics:
        chance = 100 / metrics["candidates"]
        line += (
            f"; R@1 image→text {metrics['image_to_text_r1']:.1f} %, text→image {metrics['text_to_image_r1']:.1f} %"
            f" (chance {chance:.2f} %)"
        )
    if "image_to_text_reranked_r1" in metrics:
        line += (
            f"; re-ranked by ITM {metrics['image_to_text_reranked_r1']:.1f} %, "
            f"{metrics['text_to_image_reranked_r1']:.1f} %"
        )
    return line


def closing_lines(summary: dict[str, Any], path: Path) -> list[str]:
    """What a run says last: loss, speed, and memory as measured and as predicted."""
    lines = [
        f"loss {_loss(summary['loss_first'])} → {_loss(summary['loss_last'])} in {summary['steps']} steps, "
        f"{summary['samples_per_second']:.0f} samples/s, "
        f"{summary['precision_used']}, {summary['recomputed_layers']} layers recomputed",
        f"peak allocated {peaks_line(summary['peak_allocated_bytes'], summary['predicted_peak_bytes'])}",
    ]
    if summary["skipped_steps"]:
        lines.append(f"{summary['skipped_steps']} steps skipped: loss or gradients were not finite")
    return [*lines, f"results in {path}"]


def peaks_line(measured: dict[str, int], predicted: dict[str, int] | None) -> str:
    """Measured peaks by device, with the predicted ones and how far these are off."""
    words = []
    for device, value in measured.items():
        word = f"{device} {value / 2**20:.0f} MiB"
        if predicted is not None and device in predicted and value:
            off = 100 * (predicted[device] / value - 1)
            word += f" (predicted {predicted[device] / 2**20:.0f} MiB, {off:+.1f} %)"
        words.append(word)
    return ", ".join(words) + ("" if predicted is not None else " (not predicted)")


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"
