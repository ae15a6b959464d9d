"""Finds, signals and ends the processes that one ``vlfit launch`` started on this machine.

They are known by a variable in their environment, so that none is lost when its parent dies or it
starts a session of its own; a process id alone could by then belong to somebody else.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable

import psutil

VARIABLE = "VLFIT_LAUNCH_ID"


def members(launch_id: str) -> list[psutil.Process]:
    """Every running process of a launch (zombies have no environment and are not among them)."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(VARIABLE) == launch_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def ranks(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that a launcher started as ranks: they have a LOCAL_RANK and their parent has none."""
    return [process for process in processes if _has_rank(process) and not _has_rank(process.parent())]


def by_rank(processes: Iterable[psutil.Process]) -> dict[str, psutil.Process]:
    """The same by their number in the whole run."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found[process.environ().get("RANK", "?")] = process
    return found


def _has_rank(process: psutil.Process | None) -> bool:
    try:
        return process is not None and "LOCAL_RANK" in process.environ()
    except psutil.Error:
        return False


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each process that still runs."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def end(launch_id: str, save_seconds: float, grace_seconds: float = 3) -> list[int]:
    """End every process of a launch; gives the exit codes of those that became children of this one.

    Ranks are asked first (SIGTERM: save and end) and get ``save_seconds``; their launchers then have
    ``grace_seconds`` to end by themselves, and as long again once asked. What is left is killed.
    """
    codes: list[int] = []

    def reap() -> None:
        with contextlib.suppress(ChildProcessError):
            while (waited := os.waitpid(-1, os.WNOHANG))[0]:
                codes.append(os.waitstatus_to_exitcode(waited[1]))

    def wait(awaited: list[psutil.Process], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(runs(process) for process in awaited) and time.monotonic() < deadline:
            reap()
            time.sleep(0.05)

    asked = ranks(members(launch_id))
    send(asked, signal.SIGTERM)
    wait(asked, save_seconds)
    wait(members(launch_id), grace_seconds)
    send(members(launch_id), signal.SIGTERM)
    wait(members(launch_id), grace_seconds)
    while left := members(launch_id):
        send(left, signal.SIGKILL)
        time.sleep(0.05)
        reap()
    reap()
    return codes


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended (one that nobody has waited for yet has)."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
