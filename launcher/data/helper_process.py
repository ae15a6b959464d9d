"""How processes that help a packer or a rank behave: they leave signals to it, and end when it is gone."""

import os
import signal
import threading
from multiprocessing import parent_process


def follow_parent() -> None:
    """Ignore what a scheduler or a terminal sends to a whole group, and end when the parent ends.

    A parent that is killed cannot dismiss its helpers. Those of a fork server would not notice: the server
    is their parent to the system, and it stays while one of them does. torch's own watchdog asks the system.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
