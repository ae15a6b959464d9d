"""Ranks of train.py forked from a process that has the imports done: a start costs a second or two, not ten."""

import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

LIBRARIES = ("deepspeed", "fairscale.nn", "fairscale.optim", "timm", "transformers", "launcher.opening")


def import_libraries() -> None:
    """Import what every run needs; call it before the first fork, and start no thread."""
    for name in LIBRARIES:
        importlib.import_module(name)
    from launcher.memory.measure import _allocator

    _allocator()


def fork_ranks(
    arguments: list[str], ranks: int, log: Path, prepare: Callable[[], None] = lambda: None
) -> list[int]:
    """Start train.py's ``main`` in ``ranks`` processes, as torchrun would; gives their process ids.

    Their output is appended to ``log``. ``prepare`` is called first in each. The caller waits for them.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [_fork(arguments, rank, ranks, port, log, prepare) for rank in range(ranks)]


def _fork(
    arguments: list[str], rank: int, ranks: int, port: int, log: Path, prepare: Callable[[], None]
) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if ranks > 1:
            places = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks}
            places |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
            places |= {"GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": port}
            os.environ.update({name: str(value) for name, value in places.items()})
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        prepare()
        from launcher.train import main

        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
