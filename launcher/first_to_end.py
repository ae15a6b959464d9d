"""Which rank of a launch ended first: the others mostly die of its end, with longer messages."""

import time

import psutil

from launcher import family

_SECONDS_BETWEEN_LOOKS = 1.0


class FirstToEnd:
    """Watches the ranks of a launch on this machine; ``look`` is called often, and cheap once they are known."""

    def __init__(self, launch_id: str) -> None:
        self._launch_id = launch_id
        self._ranks: dict[str, psutil.Process] = {}
        self._next_look = 0.0
        self._first: str | None = None

    def look(self) -> None:
        """Remember the first rank that is gone."""
        if self._first is not None:
            return
        for rank, process in self._ranks.items():
            if not family.runs(process):
                self._first = f"rank {rank} (process {process.pid})"
                return
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _SECONDS_BETWEEN_LOOKS
            self._ranks |= family.by_rank(family.ranks(family.members(self._launch_id)))

    def name(self) -> str | None:
        """Give the rank's number and process; None where no rank was seen to end before the launcher."""
        return self._first
