"""Runs a launcher of ranks so that nothing outlives it and no failure passes as success.

What deepspeed 0.19's launcher does, and what is done here instead:
- SIGTERM or SIGUSR1 ends it but not its workers → signals go to the ranks, which save; the launcher ends
  when they have.
- it exits 0 when its child was killed → ranks found after its end mean failure.
- a rank's death by signal n becomes exit code 256 - n → 128 + n, as in a shell.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

from launcher import family
from launcher.first_to_end import FirstToEnd
from models.errors import EXIT_INTERRUPTED

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CROSS_RANK", "CROSS_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
)
"""What a launcher sets for its ranks; inherited from an outer one, it would contradict."""


def new_launch_id() -> str:
    """A name of one launch, safe in shells and regular expressions."""
    return secrets.token_hex(8)


def supervise(
    command: Sequence[str],
    launch_id: str,
    environ: Mapping[str, str] = os.environ,
    save_seconds: float = 120,
    signal_ranks: Callable[[signal.Signals], None] | None = None,
    remote_hosts: int = 0,
    straggler_seconds: float = 60,
) -> int:
    """Run a launcher until it and all that it started have ended; gives the exit code.

    0 only if every rank ended well; 75 if they saved on a signal; 128 + n for a death by signal n.
    A second SIGTERM or SIGINT, or ``save_seconds`` after the first signal, ends all by force.
    ``signal_ranks`` reaches ranks on other hosts. With ``remote_hosts``, the launcher's ssh connections
    are watched: ``straggler_seconds`` after one of them has ended, the other hosts are ended as well.
    """
    _adopt_orphans()
    received: list[signal.Signals] = []
    before = {n: signal.signal(n, lambda n, _: received.append(signal.Signals(n))) for n in FORWARDED}
    cleaned = {name: value for name, value in environ.items() if name not in LAUNCHER_VARIABLES}
    cleaned[family.VARIABLE] = launch_id
    watchdog = subprocess.Popen(
        [sys.executable, "-m", "launcher.watchdog", launch_id, str(save_seconds)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        launcher = subprocess.Popen(command, env=cleaned, start_new_session=True)
        forward = signal_ranks or (lambda number: _signal_local_ranks(launch_id, number))
        connections = _Connections(launch_id, remote_hosts, straggler_seconds)
        first = FirstToEnd(launch_id)
        _watch(launcher, received, forward, connections, first, save_seconds)
        left = _left_behind(launcher, launch_id)
        if remote_hosts and (left or connections.broken):
            # ranks that wait for a host which is gone cannot save
            _end_remote(launcher, forward, straggler_seconds if connections.broken else save_seconds)
        codes = family.end(launch_id, save_seconds)
        code = _exit_code(launcher.poll(), left or connections.broken, codes)
        if code not in (0, EXIT_INTERRUPTED) and first.name():
            print(f"vlfit launch: {first.name()} ended first, {_end_of(code)}", file=sys.stderr)
        return code
    finally:
        # a signal from here on must not leave anything behind either
        family.end(launch_id, save_seconds=0, grace_seconds=0)
        with contextlib.suppress(OSError):
            watchdog.communicate(b"ended\n")
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_remote(
    launcher: subprocess.Popen, forward: Callable[[signal.Signals], None], save_seconds: float
) -> None:
    forward(signal.SIGTERM)
    deadline = time.monotonic() + save_seconds
    while launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    forward(signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(10)


def _left_behind(launcher: subprocess.Popen, launch_id: str, seconds: float = 3) -> bool:
    """Whether processes outlive the launcher by more than a moment (multiprocessing's tracker ends late)."""
    deadline = time.monotonic() + (seconds if launcher.poll() == 0 else 0)
    while left := family.members(launch_id):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return bool(left)


def _watch(
    launcher: subprocess.Popen,
    received: list[signal.Signals],
    forward: Callable[[signal.Signals], None],
    connections: "_Connections",
    first: FirstToEnd,
    save_seconds: float,
) -> None:
    """Wait for the end of the launcher, passing signals on; returns early when force is needed."""
    deadline = float("inf")
    passed_on = 0
    next_reaping = 0.0
    while launcher.poll() is None:
        first.look()
        if time.monotonic() >= next_reaping:
            _reap_helpers(launcher.pid)
            next_reaping = time.monotonic() + 1
        if len(received) > passed_on:
            number = received[passed_on]
            if passed_on and number in (signal.SIGTERM, signal.SIGINT):
                return  # asked twice
            forward(signal.SIGTERM if number == signal.SIGHUP else number)
            passed_on += 1
            deadline = min(deadline, time.monotonic() + save_seconds)
        if time.monotonic() > deadline or connections.lost():
            return
        time.sleep(0.05)


class _Connections:
    """The ssh processes of a launcher on several hosts: one ends with its host's ranks, or is cut off."""

    def __init__(self, launch_id: str, hosts: int, straggler_seconds: float) -> None:
        self._launch_id, self._hosts, self._seconds = launch_id, hosts, straggler_seconds
        self._most = 0
        self._next_look = self._short_since = 0.0
        self.broken = False

    def lost(self) -> bool:
        """Whether one host has ended for long while others have not."""
        now = time.monotonic()
        if not self._hosts or now < self._next_look:
            return False
        self._next_look = now + 1
        count = sum(process.name() == "ssh" for process in family.members(self._launch_id))
        self._most = max(self._most, count)
        if self._most < self._hosts or count == self._hosts or count == 0:
            self._short_since = 0.0
            return False
        self._short_since = self._short_since or now
        if now - self._short_since > self._seconds:
            print(
                f"vlfit launch: {self._hosts - count} of {self._hosts} hosts ended or cannot be reached; "
                "ending the others",
                file=sys.stderr,
            )
            self.broken = True
        return self.broken


def _exit_code(returned: int | None, orphans: bool, adopted: list[int]) -> int:
    if EXIT_INTERRUPTED in (returned, *adopted):
        return EXIT_INTERRUPTED
    for code in (returned, *adopted):
        if code is not None and code < 0:
            return 128 - code
        if code is not None and 192 < code < 255:  # sys.exit(-n) of deepspeed's launcher; 255 is ssh's own
            return 128 + 256 - code
        if code:
            return code
    return 1 if orphans or returned is None else 0


def _end_of(code: int) -> str:
    killed = {128 + number.value: number.name for number in signal.Signals}
    return f"killed by {killed[code]}" if code in killed else f"with exit code {code}"


def _signal_local_ranks(launch_id: str, number: signal.Signals) -> None:
    processes = family.members(launch_id)
    # before there are ranks, the launcher itself is to stop
    family.send(family.ranks(processes) or processes, number)


def _reap_helpers(launcher: int) -> None:
    """Wait for what this process adopted (data workers of a dead rank) and that has ended.

    deepspeed's launcher takes those zombies for running, and gives them 30 s to end.
    """
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.pid != launcher and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _adopt_orphans() -> None:
    """Processes whose parent dies become children of this one (Linux), which can wait for them."""
    pr_set_child_subreaper = 36  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
