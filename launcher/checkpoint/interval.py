"""When to save: every N steps, every M minutes, only at the end, or never."""

import time


class Interval:
    """Reads ``--save-every``: ``100`` steps, ``10m`` minutes, ``none``; nothing: at the end and on a signal."""

    def __init__(self, text: str | None) -> None:
        self.ever = text != "none"
        number = text if text and self.ever else None
        self.minutes = int(number[:-1]) if number and number.endswith("m") else None
        self.steps = int(number) if number and self.minutes is None else None
        self._saved_at = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether to save after ``step``. Clocks differ between ranks: only one of them may decide."""
        if self.minutes is not None:
            return time.monotonic() - self._saved_at >= 60 * self.minutes
        return self.steps is not None and step % self.steps == 0

    def saved(self) -> None:
        """Start the clock again."""
        self._saved_at = time.monotonic()
