"""What a run says: a progress bar on a terminal, plain lines in a log. Rank 0 speaks, the others are silent."""

import contextlib
import sys
import time
from typing import Any

from launcher.engines.engine import StepResult

LOG_LINES = 20
"""Lines of progress that a run leaves in a log, however many steps it has."""


class Console:
    """Progress of one run."""

    def __init__(self, steps: int, speaks: bool) -> None:
        self.steps, self.speaks = steps, speaks
        self.every = max(1, steps // LOG_LINES)
        self.started = time.perf_counter()
        self.first_step: int | None = None
        self.bar: Any = None
        if speaks and sys.stderr.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self.task = self.bar.add_task("training", total=steps, text="")
            self.bar.start()

    def say(self, line: str) -> None:
        """Print one line."""
        if not self.speaks:
            return
        if self.bar is not None:
            self.bar.console.print(line, highlight=False, markup=False)
        else:
            self._print(line)

    def step(self, number: int, result: StepResult, samples_per_second: float) -> None:
        """Report optimizer step ``number`` (from 1)."""
        if not self.speaks:
            return
        terms = " ".join(f"{name} {value:.3f}" for name, value in result.losses.items())
        text = f"loss {result.loss:.3f} ({terms}) {samples_per_second:.0f} samples/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=number, text=text)
        elif number == 1 or number % self.every == 0 or number == self.steps:
            skipped = ", skipped (overflow)" if result.overflow else ""
            self._print(f"step {number}/{self.steps} {text}{skipped}")

    def _print(self, line: str) -> None:
        # a log on a full disk, or a reader that has gone, ends no run
        with contextlib.suppress(OSError):
            print(line, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
