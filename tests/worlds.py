"""Several ranks in one go: a function in each of a world's processes, with an end to waiting."""

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launcher.distributed import Distributed
from launcher.process_group import start_process_group


def spawn(world: int, program: Callable[..., None], *arguments: Any, timeout: int = 240) -> None:
    """Run ``program(distributed, *arguments)`` on each rank of a gloo world, fresh processes.

    A rank that fails fails the test, with its traceback; one that hangs does so after ``timeout`` seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = torch.multiprocessing.spawn(_rank, (world, port, program, arguments), nprocs=world, join=False)
    deadline = time.monotonic() + timeout
    while not ranks.join(timeout=5):
        if time.monotonic() > deadline:
            for process in ranks.processes:
                process.kill()
            pytest.fail(f"a world of {world} did not end within {timeout} s")


def _rank(rank: int, world: int, port: int, program: Callable[..., None], arguments: tuple) -> None:
    distributed = Distributed(rank, rank, world, world, 0, 1, "127.0.0.1", port, "torchrun")
    start_process_group(distributed, torch.device("cpu"))
    program(distributed, *arguments)
    dist.destroy_process_group()
