"""A run's directory: plan files, metrics, TensorBoard events and the summary."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from launcher.growing_file import GrowingFile
from models.errors import UserError


class RunDirectory:
    """Written by rank 0 only. Numbers go to ``metrics.jsonl`` line by line, so a killed run keeps them.

    A full disk ends no run: steps wait for space, and events of that time are missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = GrowingFile(path / "metrics.jsonl")
        self._is_full = False
        self._events: Any = None

    @classmethod
    def create(
        cls, path: str | Path, files: dict[str, str], resume_step: int | None = None
    ) -> "RunDirectory":
        """Make the directory and write the plan files into it; a run that goes on keeps ``resume_step`` steps.

        Raises UserError where it holds a run that would be overwritten.
        """
        path = Path(path)
        plan = path / "plan"
        if path.exists() and not path.is_dir():
            raise UserError(f"--output {path}: is a file; give a directory")
        if plan.is_dir():
            for name, text in files.items() if resume_step is None else ():
                old = plan / name
                if not old.is_file() or old.read_text() != text:
                    raise UserError(
                        f"--output {path}: holds a run with another plan ({name} differs); give another directory"
                    )
            if resume_step is None and (path / "metrics.jsonl").exists():
                raise UserError(
                    f"--output {path}: holds a run already; give another directory, or go on with --resume auto"
                )
        elif path.is_dir() and any(path.iterdir()):
            raise UserError(f"--output {path}: is not empty and holds no run; give another directory")
        try:
            plan.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (plan / name).write_text(text)
            if resume_step is not None:
                _forget_steps_after(resume_step, path / "metrics.jsonl")
        except OSError as error:
            raise UserError(f"--output {path}: {error.strerror or error}") from None
        return cls(path)

    def write_step(self, metrics: dict[str, Any]) -> str | None:
        """Append one optimizer step; gives what to warn of when the disk takes no more, once."""
        problem = self._metrics.write_line(json.dumps(metrics))
        if problem is None:
            problem = self._write_events(metrics)
        was_full, self._is_full = self._is_full, problem is not None
        if problem is None or was_full:
            return None
        return f"{self.path}: metrics wait, events are left out ({problem.strerror or problem})"

    def _write_events(self, metrics: dict[str, Any]) -> OSError | None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            if self._events is None:
                self._events = SummaryWriter(str(self.path))
            step = metrics["step"]
            for name in ("loss", "lr", "grad_norm", "loss_scale", "samples_per_second"):
                if metrics.get(name) is not None:
                    self._events.add_scalar(name, metrics[name], step)
            for name, value in metrics["losses"].items():
                self._events.add_scalar(f"losses/{name}", value, step)
            for device, value in metrics["peak_allocated_bytes"].items():
                self._events.add_scalar(f"peak_allocated_bytes/{device}", value, step)
        except OSError as error:  # its thread has ended: the next step opens another file
            self._events = None
            return error
        return None

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json`` in one move."""
        target = self.path / "summary.json"
        partial = target.with_suffix(".tmp")
        partial.write_text(json.dumps(summary, indent=1) + "\n")
        os.replace(partial, target)

    def close(self) -> None:
        """Flush everything."""
        self._metrics.close()
        if self._events is not None:
            with contextlib.suppress(OSError):
                self._events.close()


def _forget_steps_after(step: int, metrics: Path) -> None:
    """Drop the steps that will be done again, and a last line that a kill cut off."""
    if not metrics.exists():
        return
    kept = []
    for line in metrics.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            continue
    partial = metrics.with_suffix(".tmp")
    partial.write_text("".join(kept))
    os.replace(partial, metrics)
