"""Progress of a long command on standard error: a bar in a terminal, a line now and then in a log."""

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

_SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Callable (done, total or None) within a ``with`` block; shows rate and time left."""

    def __init__(self, what: str) -> None:
        self.what = what
        console = Console(stderr=True)
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
        self.bar = Bar(*columns, console=console) if console.is_terminal else None
        self.task = self.bar.add_task(what, total=None) if self.bar else None
        self.started = self.told = time.monotonic()
        self.first: int | None = None

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def __call__(self, done: int, total: int | None) -> None:
        """Show that ``done`` of ``total`` are done; the first call may start beyond zero (a resumed run)."""
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=done, total=total)
            return
        now = time.monotonic()
        if self.first is None:
            self.first, self.started = done, now
        if now - self.told >= _SECONDS_BETWEEN_LINES:
            self.told = now
            print(self._line(done, total, now), file=sys.stderr, flush=True)

    def _line(self, done: int, total: int | None, now: float) -> str:
        rate = (done - (self.first or 0)) / max(now - self.started, 1e-9)
        if total is None:
            return f"{self.what}: {done}, {rate:.0f}/s"
        left = (total - done) / rate if rate else float("inf")
        return f"{self.what}: {done} of {total}, {rate:.0f}/s, {left:.0f} s left"


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:.0f}/s")
