"""Signals of schedulers and launchers, and the children that must not see them.

``srun`` hands a signal to every process of a step, not to the ranks alone (SLURM 22.05), and a terminal
sends Ctrl-C to the whole group. A data worker or helper without a handler dies of it while its rank is
saving.
"""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

SAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Each asks a run to save and end with exit code 75."""


class StopRequest:
    """Remembers a save signal; the loop looks at ``received`` between steps. A second SIGINT ends at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._receive) for number in SAVE_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            os._exit(128 + signal.SIGINT)
        self.received = signal.Signals(number)


@contextmanager
def shielded_children() -> Iterator[None]:
    """Start child processes inside: they never see ``SAVE_SIGNALS`` but still die of SIGKILL.

    A blocked signal stays blocked in a forked and in an executed program, unlike a handler, which exec
    resets to the default, that is, to death. End such a child by SIGKILL or through its own channel, and
    give it ``die_with_parent``.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SAVE_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent() -> None:
    """Called in a child (``preexec_fn``, ``worker_init_fn``): Linux kills it when its parent ends.

    Otherwise the children of a rank that was killed stay: ``proctrack/linuxproc`` does not find them.
    """
    parent = os.getppid()
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)
