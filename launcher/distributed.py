"""Who this process is among all processes of a run, whatever started it.

deepspeed, torchrun, SLURM's ``srun`` and Open MPI each describe a process by variables of their own.
``Distributed.from_environment`` maps all of them to one description. It is a pure function of the
environment: it opens no socket and asks no daemon. What does not add up is refused here, before a
process group waits half an hour for ranks that do not exist.

             rank          world size             local rank, its size        node rank, nodes
  deepspeed  RANK          WORLD_SIZE             LOCAL_RANK, LOCAL_SIZE      CROSS_RANK, CROSS_SIZE
  torchrun   RANK          WORLD_SIZE             LOCAL_RANK,                 GROUP_RANK,
                                                  LOCAL_WORLD_SIZE            GROUP_WORLD_SIZE
  slurm      SLURM_PROCID  SLURM_STEP_NUM_TASKS   SLURM_LOCALID,              SLURM_NODEID,
                                                  SLURM_STEP_TASKS_PER_NODE   SLURM_STEP_NUM_NODES
  openmpi    OMPI_COMM_WORLD_{RANK, SIZE, LOCAL_RANK, LOCAL_SIZE}             derived from these
  python     0             1                      0, 1                        0, 1
"""

import ipaddress
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from launcher.hostlist import expand_counts, expand_hostlist
from models.errors import UserError

Launcher = Literal["python", "deepspeed", "torchrun", "slurm", "openmpi"]

# Linux hands out 32768-60999 to outgoing connections, so a port above could be taken at any moment.
FIRST_PORT, LAST_PORT = 10_000, 32_767


@dataclass(frozen=True)
class Distributed:
    """One process of a run.

    ``master_port`` 0 means any free port: a single process has nobody to agree with.
    ``visible_devices`` are the entries of CUDA_VISIBLE_DEVICES (numbers, GPU UUIDs or MIG ids), or
    None when it is not set, that is, every GPU of the node is visible.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    nodes: int
    master_address: str
    master_port: int
    launcher: Launcher
    visible_devices: tuple[str, ...] | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Distributed":
        """Describe this process from its environment variables; raises UserError on a contradiction."""
        if "TORCHELASTIC_RUN_ID" in environ:
            described = _torchrun(environ)
        elif "CROSS_RANK" in environ and "RANK" in environ:
            described = _deepspeed(environ)
        elif "OMPI_COMM_WORLD_RANK" in environ:
            described = _openmpi(environ)
        elif _is_slurm_task(environ):
            described = _slurm(environ)
        else:
            described = _python(environ)
        described._check(environ)
        return described

    def _check(self, environ: Mapping[str, str]) -> None:
        for name, value, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
            ("node rank", self.node_rank, self.nodes),
        ):
            if not 0 <= value < size:
                raise UserError(f"{self.launcher} says {name} {value} of {size}; {_shown(environ)}")
        if self.local_world_size > self.world_size or self.nodes > self.world_size:
            raise UserError(
                f"{self.launcher} says {self.world_size} processes in all, {self.local_world_size} on this "
                f"node and {self.nodes} nodes, which contradict each other; {_shown(environ)}"
            )
        if self.nodes > 1 and is_loopback(self.master_address):
            raise UserError(
                f"MASTER_ADDR is {self.master_address}, which every one of the {self.nodes} nodes takes for "
                "itself; set it to an address of the first node that the others can reach"
            )
        if self.world_size > 1 and not 1 <= self.master_port <= 65_535:
            raise UserError(f"MASTER_PORT is {self.master_port}; it must be from 1 to 65535")
        if "SLURM_STEP_ID" in environ and self.launcher in ("deepspeed", "torchrun"):
            # srun starts one launcher per task; each must know of the others
            started = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)
            if started != self.nodes:
                raise UserError(
                    f"srun started {started} times {self.launcher} (SLURM_STEP_NUM_TASKS), but it knows "
                    f"{self.nodes} node(s): they would train apart; start it once per node with the "
                    "number of nodes, or let srun start the training program itself"
                )

    def environment(self) -> dict[str, str]:
        """Give the variables that torch.distributed and deepspeed read (``env://``)."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }

    def require_world_size(self, needed: int, why: str) -> None:
        """Refuse to run with another number of processes than the plan needs.

        A run that lost its other nodes would otherwise train on, alone and with a smaller batch.
        """
        if self.world_size != needed:
            raise UserError(
                f"{why} needs {needed} processes, but {self.launcher} started {self.world_size} "
                f"(on {self.nodes} node(s)); start {needed}, or change the plan"
            )

    def widened(self, environ: Mapping[str, str], stages: int) -> "Distributed":
        """This process with all of its node's GPUs in sight, where deepspeed's launcher shows it too few.

        ``deepspeed --num_gpus 2`` lets 2 processes see the GPUs 0 and 1, however many each of them drives;
        ``vlfit launch`` says in VLFIT_VISIBLE_DEVICES which ones it saw. A list by anyone else stays as it is.
        """
        visible, processes = self.visible_devices, self.local_world_size
        if self.launcher != "deepspeed" or visible is None or len(visible) >= processes * stages:
            return self
        if "VLFIT_VISIBLE_DEVICES" in environ:
            return replace(self, visible_devices=_listed(environ["VLFIT_VISIBLE_DEVICES"]))
        counted = tuple(str(number) for number in range(processes))
        return replace(self, visible_devices=None) if visible == counted else self

    def first_device(self, stages: int = 1) -> int:
        """Index of the first of this process's ``stages`` GPUs among those it sees.

        Where the launcher shows each process only its own GPUs (``srun --gpus-per-task``), that is 0;
        where all of a node's GPUs are visible, groups of ``stages`` follow each other by local rank.
        """
        if self.visible_devices is None or len(self.visible_devices) >= self.local_world_size * stages:
            return self.local_rank * stages
        if len(self.visible_devices) == stages and self.launcher == "slurm":
            return 0
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={','.join(self.visible_devices)} shows {len(self.visible_devices)} GPU(s) "
            f"but the {self.local_world_size} process(es) of this node need {stages} each"
        )

    def header(self, backend: str, device: str) -> list[str]:
        """Lines that a run prints first: what was started, where, on which devices, with which backend."""
        visible = "all" if self.visible_devices is None else ",".join(self.visible_devices) or "none"
        return [
            f"world size {self.world_size}: {self.nodes} node(s), {self.local_world_size} process(es) on "
            f"this one, started by {self.launcher}",
            f"rank 0 at {self.master_address}:{self.master_port}, backend {backend}, device {device}, "
            f"visible GPUs {visible}",
        ]


def port_of_job(job_id: int, step_id: int = 0) -> int:
    """Port of a job: another for each of 20000 jobs in a row, below the ephemeral range."""
    return FIRST_PORT + (job_id + 5003 * step_id) % 20_000


def is_loopback(address: str) -> bool:
    """Whether an address or name means "this machine" on every machine."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address.split(".")[0] in ("localhost", "ip6-localhost")


def _python(environ: Mapping[str, str]) -> Distributed:
    world = _number(environ, "WORLD_SIZE", default=1)
    if world > 1 or _number(environ, "RANK", default=0) > 0:
        raise UserError(
            f"{_shown(environ)}, but no known launcher set them; start the program with deepspeed, torchrun "
            "or srun, or unset them"
        )
    tasks = _number(environ, "SLURM_NTASKS", default=1)
    if tasks > 1:
        raise UserError(
            f"this SLURM job has {tasks} tasks (SLURM_NTASKS), but the program was started without srun and "
            "would train alone; put srun in front of it (inside a job: srun --ntasks=1 for a single process)"
        )
    return Distributed(0, 0, 1, 1, 0, 1, "127.0.0.1", 0, "python", _visible(environ))


def _deepspeed(environ: Mapping[str, str]) -> Distributed:
    return _from_rendezvous(environ, "deepspeed", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def _torchrun(environ: Mapping[str, str]) -> Distributed:
    return _from_rendezvous(environ, "torchrun", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def _from_rendezvous(
    environ: Mapping[str, str], launcher: Launcher, local_size: str, node_rank: str, nodes: str
) -> Distributed:
    return Distributed(
        rank=_number(environ, "RANK"),
        local_rank=_number(environ, "LOCAL_RANK"),
        world_size=_number(environ, "WORLD_SIZE"),
        local_world_size=_number(environ, local_size),
        node_rank=_number(environ, node_rank),
        nodes=_number(environ, nodes),
        master_address=_text(environ, "MASTER_ADDR"),
        master_port=_number(environ, "MASTER_PORT"),
        launcher=launcher,
        visible_devices=_visible(environ),
    )


def _openmpi(environ: Mapping[str, str]) -> Distributed:
    rank = _number(environ, "OMPI_COMM_WORLD_RANK")
    world = _number(environ, "OMPI_COMM_WORLD_SIZE")
    local_rank = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    local_world = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    _agree(environ, ("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", local_rank))
    # Open MPI has no variable for the node's number (its NODE_RANK is the rank within the node).
    # Full nodes are assumed; ranks fill a node first (--map-by slot) or go round (--map-by node).
    nodes = -(-world // max(local_world, 1))
    by_slot = rank % max(local_world, 1) == local_rank
    if nodes > 1 and "MASTER_ADDR" not in environ:
        raise UserError("Open MPI does not say where rank 0 runs; add: mpirun -x MASTER_ADDR=<first node>")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "0"
    return Distributed(
        rank=rank,
        local_rank=local_rank,
        world_size=world,
        local_world_size=local_world,
        node_rank=rank // max(local_world, 1) if by_slot else rank % nodes,
        nodes=nodes,
        master_address=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(environ, "MASTER_PORT", default=port_of_job(zlib.crc32(job.encode()))),
        launcher="openmpi",
        visible_devices=_visible(environ),
    )


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    # The batch script itself also has SLURM_PROCID=0 and SLURM_NTASKS; only srun's tasks have a step.
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ


def _slurm(environ: Mapping[str, str]) -> Distributed:
    rank = _number(environ, "SLURM_PROCID")
    local_rank = _number(environ, "SLURM_LOCALID")
    world = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    node_rank = _number(environ, "SLURM_NODEID")
    tasks = expand_counts(_text(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    names = expand_hostlist(_text(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=len(names))
    # RANK=0 exported in the batch script would make every task believe to be the first
    _agree(environ, ("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", local_rank))
    if sum(tasks) != world or len(tasks) != nodes or len(names) != nodes or node_rank >= nodes:
        raise UserError(
            f"SLURM says {world} tasks on {nodes} nodes, but {len(names)} node names and tasks per node "
            f"{tasks}; {_shown(environ)}"
        )
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    return Distributed(
        rank=rank,
        local_rank=local_rank,
        world_size=world,
        local_world_size=tasks[node_rank],
        node_rank=node_rank,
        nodes=nodes,
        master_address=environ.get("MASTER_ADDR") or (names[0] if nodes > 1 else "127.0.0.1"),
        master_port=_number(environ, "MASTER_PORT", default=port_of_job(job, step)),
        launcher="slurm",
        visible_devices=_visible(environ),
    )


def _agree(environ: Mapping[str, str], *expected: tuple[str, int]) -> None:
    for name, value in expected:
        if name in environ and _number(environ, name) != value:
            raise UserError(
                f"{name}={environ[name]} is set, but the launcher says {value}; do not export {name} yourself"
                f" ({_shown(environ)})"
            )


def _text(environ: Mapping[str, str], *names: str) -> str:
    """Value of the first variable that is set (a step's own before the job's)."""
    for name in names:
        if environ.get(name):
            return environ[name]
    raise UserError(f"the launcher did not set {names[0]}; {_shown(environ)}")


def _number(environ: Mapping[str, str], *names: str, default: int | None = None) -> int:
    for name in names:
        if environ.get(name):
            try:
                return int(environ[name])
            except ValueError:
                raise UserError(f"{name}={environ[name]!r} is not a number") from None
    if default is None:
        raise UserError(f"the launcher did not set {names[0]}; {_shown(environ)}")
    return default


_SHOWN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
    *("CROSS_RANK", "CROSS_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)


def _shown(environ: Mapping[str, str]) -> str:
    return "set are " + (" ".join(f"{name}={environ[name]}" for name in _SHOWN if name in environ) or "none")


def _visible(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None or listed == "NoDevFiles":  # SLURM's word for a job without GPUs
        return () if listed else None
    return _listed(listed)


def _listed(devices: str) -> tuple[str, ...]:
    ids: list[str] = []
    for entry in (part.strip() for part in devices.split(",")):
        if not entry or entry == "-1":
            break  # CUDA ignores everything from the first invalid entry on
        ids.append(entry)
    return tuple(ids)
