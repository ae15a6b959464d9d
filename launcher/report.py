"""``vlfit report``: what runs cost and reached, predicted beside measured, from their run directories."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import UserError

if TYPE_CHECKING:
    from launcher.memory.prediction import Prediction

PICTURE = "report.png"


def read_run(run: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Give summary and metrics of a run directory. Raises UserError where one is missing or damaged."""
    folder = Path(run)
    summary_file, metrics_file = folder / "summary.json", folder / "metrics.jsonl"
    try:
        summary = json.loads(summary_file.read_text())
        metrics = [json.loads(line) for line in metrics_file.read_text().splitlines() if line.strip()]
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: no such file; {folder} holds no finished run") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: summary.json or metrics.jsonl cannot be read: {error}") from None
    if not metrics:
        raise UserError(f"{metrics_file}: is empty; the run took no step")
    return summary, metrics


def predicted_memory(run: str | Path, summary: dict[str, Any]) -> "Prediction":
    """Predict the memory of a run again, from the plan files that it keeps."""
    from launcher.config.device import DeviceSupport
    from launcher.memory.simulate import predict
    from launcher.memory.strategy import Strategy
    from launcher.plan import make_plan

    plan = Path(run) / "plan"
    on_gpu = any(device.startswith("cuda") for device in summary["peak_allocated_bytes"])
    used = summary["precision_used"]
    device = DeviceSupport(
        type="cuda" if on_gpu else "cpu", fp16=used.endswith("fp16"), bf16=used.endswith("bf16")
    )
    partition, engine = plan / "partition.yaml", summary["engine"]
    read = make_plan(
        config=str(plan / "config.json"),
        model=str(plan / "model.yaml"),
        partition=str(partition) if partition.exists() else None,
        pipeline=None if engine == "zero" else engine,
        steps=1,
        epochs=None,
        samples=0,
        world_size=summary["world_size"],
        device=device,
    )
    return predict(Strategy.of(read, summary["world_size"], device.type))


def print_runs(runs: list[tuple[str, dict[str, Any]]], as_json: bool) -> None:
    """Print one row per run."""
    rows = [_row(name, summary) for name, summary in runs]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    headings = ["run", "engine", "precision", "ranks", "recomputed", "steps", "loss", "s/step", "samples/s"]
    for heading in [*headings, "predicted MiB", "measured MiB", "error"]:
        table.add_column(heading, justify="left" if heading in ("run", "engine", "precision") else "right")
    for row in rows:
        error = "–" if row["error"] is None else f"{100 * row['error']:+.1f} %"
        table.add_row(
            row["run"],
            row["engine"],
            row["precision"],
            str(row["world_size"]),
            str(row["recomputed_layers"]),
            str(row["steps"]),
            f"{row['loss_first']:.3f} → {row['loss_last']:.3f}",
            f"{row['step_seconds']:.3f}",
            f"{row['samples_per_second']:.0f}",
            _mib(row["predicted_peak_bytes"]),
            _mib(row["measured_peak_bytes"]),
            error,
        )
    console = Console()
    (console if console.is_terminal else Console(width=150)).print(table)


def draw(run: str | Path, path: Path, summary: dict[str, Any], metrics: list[dict[str, Any]]) -> None:
    """Draw loss, throughput and memory of a run."""
    from launcher.plots import draw_run

    ranks = summary["world_size"]
    draw_run(
        metrics,
        path,
        title=f"{Path(run).name}: {summary['engine']}, {summary['precision_used']}, {ranks} rank{'s' * (ranks > 1)}",
        prediction=predicted_memory(run, summary),
        measured_bytes=_largest(summary["peak_allocated_bytes"]),
    )


def _row(name: str, summary: dict[str, Any]) -> dict[str, Any]:
    measured = _largest(summary["peak_allocated_bytes"])
    predicted = _largest(summary["predicted_peak_bytes"])
    known = measured and predicted
    return {
        "run": name,
        "engine": summary["engine"],
        "precision": summary["precision_used"],
        "world_size": summary["world_size"],
        "recomputed_layers": _count(summary["recomputed_layers"]),
        "steps": summary["steps"],
        "loss_first": _number(summary["loss_first"]),
        "loss_last": _number(summary["loss_last"]),
        "step_seconds": _number(summary["step_seconds_median"]),
        "samples_per_second": _number(summary["samples_per_second"]),
        "predicted_peak_bytes": predicted,
        "measured_peak_bytes": measured,
        "error": round(predicted / measured - 1, 4) if known and predicted and measured else None,
    }


def _largest(peaks: dict[str, int] | int | None) -> int | None:
    return max(peaks.values(), default=None) if isinstance(peaks, dict) else peaks


def _count(layers: list[str] | int) -> int:
    return layers if isinstance(layers, int) else len(layers)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _mib(size: int | None) -> str:
    return "–" if size is None else f"{size / 2**20:.1f}"
