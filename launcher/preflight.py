"""The first seconds of a run on several nodes: is every node like the others, and does the network work?

Each rank collects facts of its node, all ranks exchange them, and ``judge``, a pure function, names the
nodes that differ, with the ``--exclude`` to paste. A wrong node is found in a second here, and after
hours as a hang or a different loss otherwise.
"""

import importlib.metadata
import os
import platform
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.distributed import Distributed
from models.errors import UserError

CLOCK_SKEW_SECONDS = 2.0
FREE_DISK_BYTES = 1 << 30
FREE_SHM_BYTES = 64 << 20
FREE_DEVICE_SHARE = 0.8
PACKAGES = ("vlfit", "torch", "deepspeed", "fairscale", "transformers", "timm")


@dataclass(frozen=True)
class Facts:
    """What one rank knows of itself and its node; sizes in bytes, ``clock`` in seconds since 1970."""

    rank: int
    node: str
    versions: tuple[tuple[str, str], ...]
    plan: str
    data: str
    gpus: int
    device_free_bytes: int
    device_total_bytes: int
    address: str
    clock: float
    disk_free_bytes: int
    shm_free_bytes: int
    allreduce_sum_is_right: bool = True
    allreduce_seconds: float = 0.0


@dataclass(frozen=True)
class Problem:
    """What is wrong with which nodes; ``fatal`` ones end the run."""

    nodes: tuple[str, ...]
    text: str
    fatal: bool = True


def judge(facts: Sequence[Facts]) -> list[Problem]:
    """Compare the facts of all ranks; the majority is taken to be right."""
    problems: list[Problem] = []

    def odd_ones(what: str, value: Callable[[Facts], object], fatal: bool = True) -> None:
        usual = Counter(map(value, facts)).most_common(1)[0][0]
        for odd in {value(fact) for fact in facts} - {usual}:
            nodes = _nodes(fact for fact in facts if value(fact) == odd)
            problems.append(Problem(nodes, f"{what} {odd}, on the other nodes {usual}", fatal))

    for package in dict.fromkeys(name for fact in facts for name, _ in fact.versions):
        odd_ones(package, lambda fact, package=package: dict(fact.versions).get(package, "missing"))  # type: ignore[misc]
    odd_ones("checksum of the plan", lambda fact: fact.plan)
    odd_ones("checksum of the data", lambda fact: fact.data)
    odd_ones("visible GPUs", lambda fact: fact.gpus)
    middle = sorted(fact.clock for fact in facts)[len(facts) // 2]

    def too_little(
        what: str, is_bad: Callable[[Facts], bool], shown: Callable[[Facts], str], fatal: bool
    ) -> None:
        bad = [fact for fact in facts if is_bad(fact)]
        if bad:
            problems.append(Problem(_nodes(bad), f"{what} {shown(bad[0])}", fatal))

    too_little(
        "free GPU memory",
        lambda f: f.device_free_bytes < FREE_DEVICE_SHARE * f.device_total_bytes,
        lambda f: f"{_gib(f.device_free_bytes)} of {_gib(f.device_total_bytes)}: another process is on it",
        False,
    )
    too_little(
        "clock differs by",
        lambda f: abs(f.clock - middle) > CLOCK_SKEW_SECONDS,
        lambda f: f"{f.clock - middle:+.1f} s",
        False,
    )
    too_little(
        "free disk", lambda f: f.disk_free_bytes < FREE_DISK_BYTES, lambda f: _gib(f.disk_free_bytes), False
    )
    too_little(
        "/dev/shm", lambda f: f.shm_free_bytes < FREE_SHM_BYTES, lambda f: _gib(f.shm_free_bytes), False
    )
    too_little("wrong sum of an all-reduce", lambda f: not f.allreduce_sum_is_right, lambda f: "", True)
    return problems


def run(
    distributed: Distributed,
    *,
    device: str,
    plan: str = "",
    data: str = "",
    output: str | Path = ".",
    say: Callable[[str], None] = print,
) -> list[Facts]:
    """Check all ranks; needs an initialised process group. ``plan`` and ``data`` are checksums.

    Rank 0 says what was found. Raises UserError on every rank if a node is not like the others.
    """
    import torch.distributed as dist

    mine = collect(distributed, device=device, plan=plan, data=data, output=output)
    everyone: list[Facts] = [mine] * distributed.world_size
    if distributed.world_size > 1:
        dist.all_gather_object(everyone, mine)
    problems = judge(everyone)
    fatal = [problem for problem in problems if problem.fatal]
    if distributed.rank == 0:
        for line in report(everyone, problems):
            say(line)
    if fatal:
        nodes = sorted({node for problem in fatal for node in problem.nodes})
        raise UserError(
            f"preflight: {describe(fatal[0])}" + (f" (and {len(fatal) - 1} more)" if len(fatal) > 1 else "")
            + f"; mend it, or submit with --exclude={','.join(nodes)}"
        )  # fmt: skip
    return everyone


def run_alone() -> int:
    """The checks without a run (``vlfit doctor --nodes``), by every rank of a launcher; gives 0."""
    import torch.distributed as dist

    from launcher.devices import claim_devices
    from launcher.process_group import start_process_group

    distributed = Distributed.from_environment(os.environ)
    (device,) = claim_devices(None, distributed, 1)
    start_process_group(distributed, device)
    try:
        run(distributed, device=str(device))
    finally:
        dist.destroy_process_group()
    return 0


def collect(
    distributed: Distributed, *, device: str, plan: str = "", data: str = "", output: str | Path = "."
) -> Facts:
    """Collect the facts of this rank; with several ranks this measures an all-reduce (a collective)."""
    import torch

    free = total = 0
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(torch.device(device))
    right, seconds = True, 0.0
    if distributed.world_size > 1:
        right, seconds = measure_allreduce(distributed, device)
    return Facts(
        rank=distributed.rank,
        node=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        versions=(("python", platform.python_version()), *((name, _version(name)) for name in PACKAGES)),
        plan=plan,
        data=data,
        gpus=torch.cuda.device_count() if device.startswith("cuda") else 0,
        device_free_bytes=free,
        device_total_bytes=total,
        address=_address_towards(distributed.master_address),
        clock=time.time(),
        disk_free_bytes=shutil.disk_usage(_existing(Path(output))).free,
        shm_free_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        allreduce_sum_is_right=right,
        allreduce_seconds=seconds,
    )


ALLREDUCE_BYTES = 16 << 20


def measure_allreduce(distributed: Distributed, device: str) -> tuple[bool, float]:
    """Sum known values over all ranks; gives whether each element is right, and the seconds it took."""
    import torch
    import torch.distributed as dist

    expected = distributed.world_size * (distributed.world_size + 1) / 2
    seconds, right = 0.0, True
    for _ in range(2):  # the first one sets up connections
        values = torch.full((ALLREDUCE_BYTES // 4,), distributed.rank + 1.0, device=device)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        right = right and bool((values == expected).all())  # waits for the device
        seconds = time.perf_counter() - started
    return right, seconds


def report(facts: Sequence[Facts], problems: Sequence[Problem]) -> list[str]:
    """Lines for the head of a log: what was compared, the network's speed, and each problem."""
    nodes = _nodes(facts)
    lines = [f"preflight: {len(facts)} ranks on {len(nodes)} node(s): {', '.join(nodes[:8])}"]
    if len(facts) > 1:
        slowest = max(facts, key=lambda fact: fact.allreduce_seconds)
        lines.append(
            f"preflight: all-reduce of {ALLREDUCE_BYTES >> 20} MiB in "
            f"{slowest.allreduce_seconds * 1e3:.1f} ms, "
            f"{bus_bandwidth(len(facts), slowest.allreduce_seconds) / 1e9:.2f} GB/s per rank, by address "
            f"{slowest.address}"
        )
    lines += [f"preflight: {'' if problem.fatal else 'warning: '}{describe(problem)}" for problem in problems]
    return lines


def bus_bandwidth(world_size: int, seconds: float) -> float:
    """Bytes per second over each rank's link in a ring all-reduce: 2 (n-1)/n of the data (NCCL-tests)."""
    return 2 * (world_size - 1) / world_size * ALLREDUCE_BYTES / seconds


def describe(problem: Problem) -> str:
    """One line of a problem."""
    return f"node {', '.join(problem.nodes)}: {problem.text.strip()}"


def _nodes(facts: Iterable[Facts]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(fact.node for fact in facts))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _address_towards(target: str) -> str:
    """Own address of the interface that leads to rank 0; no packet is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return probe.getsockname()[0]
    except OSError:
        return "unknown"


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
