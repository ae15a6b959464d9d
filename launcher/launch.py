"""Which command starts the ranks of a plan: deepspeed's launcher on one node or many, or torchrun.

``plan_launch`` is pure but for reading the hostfile and the partition file; ``run_launch`` starts what it
planned, under supervision.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.hostfile import read_hostfile
from launcher.options import encode_arguments, train_arguments
from launcher.processes import data_parallel_size, processes_per_node, stages_of
from launcher.supervise import new_launch_id, supervise
from models.errors import UserError

_SAFE_FOR_SHELL = re.compile(r"[\w@+=:,./-]+")  # what deepspeed's launcher passes through pdsh unharmed
SSH_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"


@dataclass(frozen=True)
class Launch:
    """A command, what it needs in its environment, and the hosts that it reaches through ssh."""

    command: tuple[str, ...]
    launch_id: str
    environment: tuple[tuple[str, str], ...] = ()
    hosts: tuple[str, ...] = ()
    signal_pattern: str = ""

    def shown(self) -> str:
        """The command as one would type it."""
        return shlex.join([*(f"{name}={value}" for name, value in self.environment), *self.command])


def plan_launch(
    arguments: argparse.Namespace, environ: Mapping[str, str], launch_id: str, port: int, program: str
) -> Launch:
    """Choose the command; raises UserError for a hostfile, device list or option that cannot work."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    devices = [part.strip() for part in visible.split(",") if part.strip()] if visible else []
    numbers = all(device.isdecimal() for device in devices)
    which = arguments.launcher or ("deepspeed" if numbers else "torchrun")
    if which == "deepspeed" and not numbers:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={visible}: deepspeed's launcher takes numbers only; --launcher torchrun "
            "takes any"
        )
    if arguments.hostfile is not None:
        if which == "torchrun":
            raise UserError(
                "--hostfile is for deepspeed's launcher; with torchrun, start vlfit launch on each node"
            )
        return _deepspeed_on_hosts(arguments, launch_id, port, program)
    if arguments.no_ssh:
        raise UserError("--no_ssh needs --hostfile, which says what the other nodes are, and --node_rank")
    gpus = arguments.gpus or len(devices) or stages_of(arguments.partition)  # of one replica at least
    processes = arguments.processes or processes_per_node(arguments, gpus)
    data_parallel_size(arguments, processes * arguments.nodes)  # refuses what the stages do not divide
    words = [program, *train_arguments(arguments)]
    if which == "torchrun":
        command = [sys.executable, "-m", "launcher.torchrun", f"--nproc-per-node={processes}"]
        if arguments.nodes > 1:
            command += [
                f"--nnodes={arguments.nodes}",
                f"--node-rank={_node_rank(arguments, arguments.nodes)}",
            ]
            command += [f"--master-addr={_master(arguments)}", f"--master-port={port}"]
        else:
            command += ["--standalone"]
        return Launch((*command, *words), launch_id)
    if arguments.nodes > 1:
        raise UserError(f"--nodes {arguments.nodes}: deepspeed's launcher needs a --hostfile that lists them")
    if len(devices) > processes:
        # FairScale: deepspeed shows each process only the first `processes` devices; the engine widens
        return Launch(
            (*_deepspeed(f"--include=localhost:{','.join(devices[:processes])}", port), *words),
            launch_id,
            environment=(("VLFIT_VISIBLE_DEVICES", ",".join(devices)),),
        )
    chosen = (
        f"--include=localhost:{','.join(devices)}" if len(devices) == processes else f"--num_gpus={processes}"
    )
    return Launch((*_deepspeed(chosen, port), *words), launch_id)


def _deepspeed(*options: str | int) -> list[str]:
    *words, port = options
    return [sys.executable, "-m", "deepspeed.launcher.runner", *map(str, words), f"--master_port={port}"]


def _deepspeed_on_hosts(arguments: argparse.Namespace, launch_id: str, port: int, program: str) -> Launch:
    hosts = read_hostfile(arguments.hostfile)
    if arguments.nodes > len(hosts):
        raise UserError(f"--nodes {arguments.nodes}: {arguments.hostfile} lists {len(hosts)} host(s)")
    if arguments.nodes > 1:
        hosts = dict(list(hosts.items())[: arguments.nodes])
    slots = set(hosts.values())
    if len(slots) > 1 and arguments.processes is None and arguments.partition is not None:
        raise UserError(f"{arguments.hostfile}: hosts of {sorted(slots)} slots: say --processes per node")
    processes = arguments.processes or processes_per_node(arguments, min(slots))
    if processes > min(slots):
        raise UserError(
            f"{arguments.hostfile}: {min(slots)} slots, but {processes} processes per node are asked for"
        )
    options = [f"--hostfile={arguments.hostfile}", f"--num_nodes={len(hosts)}"]
    # a slot is a GPU; with FairScale's pipe a process drives a group of them
    options += [f"--num_gpus={processes}"] if processes < min(slots) or arguments.processes else []
    if arguments.no_ssh:
        options += ["--no_ssh", f"--node_rank={_node_rank(arguments, len(hosts))}"]
        options.append(f"--master_addr={_master(arguments)}")
        return Launch((*_deepspeed(*options, port), program, *train_arguments(arguments)), launch_id)
    if arguments.master_addr:
        options.append(f"--master_addr={arguments.master_addr}")
    if arguments.ssh_port:
        options.append(f"--ssh_port={arguments.ssh_port}")
    options.append("--force_multi")
    # deepspeed hands these to a remote shell as they are
    for what, word in (
        ("the working directory", os.getcwd()),
        ("python", sys.executable),
        ("train.py", program),
    ):
        if not _SAFE_FOR_SHELL.fullmatch(word):
            raise UserError(
                f"{what} is {word!r}: deepspeed's launcher cannot pass this to other hosts; rename it"
            )
    words = train_arguments(arguments)
    if not all(_SAFE_FOR_SHELL.fullmatch(word) for word in words):
        words = [encode_arguments(words)]
    words.append(f"--launch-id={launch_id}")
    return Launch(
        command=(*_deepspeed(*options, port), program, *words),
        launch_id=launch_id,
        environment=(("PDSH_SSH_ARGS_APPEND", SSH_OPTIONS),),
        hosts=tuple(hosts),
        # a rank, not the launcher or the shell that started it: those have no --local_rank=NUMBER
        signal_pattern=f"--local_rank=[0-9]+ .*--launch-id={launch_id}",
    )


def _node_rank(arguments: argparse.Namespace, nodes: int) -> int:
    if arguments.node_rank is None or not 0 <= arguments.node_rank < nodes:
        raise UserError(
            f"--node_rank {arguments.node_rank}: must be from 0 to {nodes - 1}, another on each node"
        )
    return arguments.node_rank


def _master(arguments: argparse.Namespace) -> str:
    from launcher.distributed import is_loopback

    if not arguments.master_addr or is_loopback(arguments.master_addr):
        raise UserError(
            f"--master_addr {arguments.master_addr}: the first node's address for the others is needed"
        )
    return arguments.master_addr


def train_program() -> str:
    """Path of train.py, relative where that is shorter to read."""
    path = Path(__file__).with_name("train.py")
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def run_launch(
    arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ, program: str | None = None
) -> int:
    """Start the ranks, or with ``dry_run`` print the command; gives the exit code of the run."""
    from launcher.rendezvous import choose_port

    port = arguments.master_port or (29500 if arguments.dry_run else choose_port("127.0.0.1", os.getpid()))
    launch = plan_launch(arguments, environ, new_launch_id(), port, program or train_program())
    if arguments.dry_run:
        print(launch.shown())
        return 0
    if launch.hosts and shutil.which("pdsh") is None:
        raise UserError(
            "pdsh is not here; deepspeed's launcher reaches other hosts with it (or use --no_ssh)"
        )
    environ = dict(environ) | dict(launch.environment)

    def signal_remote(number: signal.Signals) -> None:
        pkill = f"pkill -{number.value} -f -- {shlex.quote(launch.signal_pattern)} || true"
        options = f"{SSH_OPTIONS} -p {arguments.ssh_port}" if arguments.ssh_port else SSH_OPTIONS
        remote = {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": options}
        subprocess.run(["pdsh", "-w", ",".join(launch.hosts), pkill], env=environ | remote, check=False)

    return supervise(
        launch.command,
        launch.launch_id,
        environ,
        save_seconds=arguments.save_seconds,
        signal_ranks=signal_remote if launch.hosts else None,
        remote_hosts=len(launch.hosts),
        straggler_seconds=arguments.straggler_seconds,
    )
