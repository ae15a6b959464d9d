"""Runs of several configs on the same model, data, seed and steps; one fresh process each."""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.config import load_config
from models.errors import DoesNotFit, UserError
from models.spec import load_spec

TRAIN = Path(__file__).parent / "train.py"


@dataclass(frozen=True)
class Run:
    """What one config cost."""

    config: str
    precision: str
    recomputed_layers: int
    peak_allocated_bytes: int
    """Largest device."""
    predicted_peak_bytes: int | None
    step_seconds: float
    """Median step."""
    loss_last: float
    memory_ratio: float
    """Against the first config."""
    step_ratio: float


def compare(arguments: argparse.Namespace) -> list[Run]:
    """Run each config in its own process. Raises UserError: a bad file, or a run that failed (its words)."""
    if arguments.steps < 3:
        raise UserError(f"--steps {arguments.steps}: give 3 or more; the first two warm up")
    load_spec(arguments.model)
    for config in arguments.config:
        load_config(config)
    folder = Path(arguments.output or f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}")
    runs: list[Run] = []
    for number, config in enumerate(arguments.config):
        print(f"{number + 1}/{len(arguments.config)} {config} …", file=sys.stderr, flush=True)
        summary = _train(arguments, config, folder / f"{number + 1}.{Path(config).stem}")
        peak = max(summary["peak_allocated_bytes"].values())
        predicted = summary["predicted_peak_bytes"]
        if isinstance(predicted, dict):
            predicted = max(predicted.values())
        first = runs[0] if runs else None
        runs.append(
            Run(
                config=Path(config).stem,
                precision=summary["precision_used"],
                recomputed_layers=summary["recomputed_layers"],
                peak_allocated_bytes=peak,
                predicted_peak_bytes=predicted,
                step_seconds=summary["step_seconds_median"],
                loss_last=summary["loss_last"],
                memory_ratio=peak / first.peak_allocated_bytes if first else 1.0,
                step_ratio=summary["step_seconds_median"] / first.step_seconds if first else 1.0,
            )
        )
    return runs


def print_table(runs: list[Run], as_json: bool) -> int:
    """Print the comparison; gives exit code 0."""
    if as_json:
        print(json.dumps([asdict(run) for run in runs], indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=None)
    for heading in (
        "config",
        "precision",
        "recomputed",
        "peak MiB",
        "predicted MiB",
        "of first",
        "s/step",
        "of first",
        "loss",
    ):
        table.add_column(heading, justify="left" if heading in ("config", "precision") else "right")
    for run in runs:
        predicted = "–" if run.predicted_peak_bytes is None else f"{run.predicted_peak_bytes / 2**20:.0f}"
        table.add_row(
            run.config,
            run.precision,
            str(run.recomputed_layers),
            f"{run.peak_allocated_bytes / 2**20:.0f}",
            predicted,
            f"{run.memory_ratio:.2f}",
            f"{run.step_seconds:.2f}",
            f"{run.step_ratio:.2f}",
            f"{run.loss_last:.3f}",
        )
    # In a log there is no terminal to fit into.
    console = Console()
    Console(width=console.width if console.is_terminal else 120).print(table)
    return 0


def _train(arguments: argparse.Namespace, config: str, output: Path) -> dict:
    command = [sys.executable, str(TRAIN), f"--config={config}", f"--model={arguments.model}"]
    command += [f"--steps={arguments.steps}", f"--seed={arguments.seed}", f"--output={output}", "--no-eval"]
    command += [f"--data={arguments.data}"] if arguments.data else []
    command += [f"--partition={arguments.partition}"] if arguments.partition else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        words = [
            line for line in done.stderr.splitlines() if line.startswith("vlfit train")
        ] or done.stderr.splitlines()
        failed = DoesNotFit if done.returncode == DoesNotFit.exit_code else UserError
        raise failed(
            f"{config}: the run ended with exit code {done.returncode}: {words[-1] if words else 'no message'}"
        )
    return json.loads((output / "summary.json").read_text())
