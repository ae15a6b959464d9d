"""A real SLURM of two nodes on this machine, in a temporary directory, for tests.

Needs Debian's ``slurm-wlm`` and ``munge`` (``.ci/packages`` installs them); without them the tests that
ask for the ``slurm_cluster`` fixture are skipped with the reason. Nothing of the system's own SLURM is
touched: own ports, own key, own configuration, everything below one directory.

    munged ── key of its own
    slurmctld ── slurmd -N n1 ── 4 CPUs, 2 "GPUs" (stand-in device files)
             └── slurmd -N n2 ── 4 CPUs, 2 "GPUs"

The names n1 and n2 do not resolve, so scripts that take a node's name for an address fail here.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue", "munged")
NODES = ("n1", "n2")
CPUS_PER_NODE, GPUS_PER_NODE = 4, 2

SLURM_CONF = """\
ClusterName=vlfit-test
SlurmctldHost={hostname}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# a requeued job waits for as long as credentials last (default: 120 s)
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
JobRequeue=1
ReturnToService=2
GresTypes=gpu
KillWait=5
OverTimeLimit=0
MinJobAge=300
InactiveLimit=0
Waittime=0
TreeWidth=50
UnkillableStepTimeout=20
SlurmctldDebug=info
SlurmdDebug=info
{nodes}
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=1:00:00 State=UP OverSubscribe=NO
"""


class SlurmCluster:
    """A running cluster; ``environment`` makes the SLURM commands talk to it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH", "SRUN"))
        } | {"SLURM_CONF": str(directory / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self._write_configuration()
        self._start_daemon("munged", "--foreground", "--force", *self._munge_options())
        wait_until((self.directory / "munge.socket").exists, 10, "munged")
        self._start_daemon("slurmctld", "-D", "-i", "-f", self.environment["SLURM_CONF"])
        for node in NODES:
            self._start_daemon("slurmd", "-D", "-N", node, "-f", self.environment["SLURM_CONF"])
        wait_until(self._all_idle, 30, "slurmctld and two slurmd", self.logs)

    def stop(self) -> None:
        """End every job and daemon; nothing is left running."""
        subprocess.run(
            ["scancel", "--full", "--signal=KILL", "--state=RUNNING"], env=self.environment, timeout=20
        )
        for daemon in reversed(self._daemons):
            children = psutil.Process(daemon.pid).children(recursive=True) if daemon.poll() is None else []
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
            for child in children:
                if child.is_running():
                    child.kill()
        for process in self.job_processes():
            process.kill()

    def run(self, *command: str, timeout: float = 60, **options) -> subprocess.CompletedProcess[str]:
        """Run a SLURM command (or any other) against this cluster, with captured text."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, **options
        )

    def submit(
        self, *arguments: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> str:
        """Submit by ``sbatch``; gives the job id."""
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            env=self.environment | dict(environment or {}),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().split(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """Fields of ``scontrol show job``: JobState, ExitCode, Restarts, …"""
        shown = self.run("scontrol", "--oneliner", "show", "job", job_id)
        return dict(re.findall(r"(\S+?)=(\S*)", shown.stdout))

    def state(self, job_id: str) -> str:
        return self.job(job_id).get("JobState", "UNKNOWN")

    def wait(self, job_id: str, *states: str, seconds: float = 60) -> dict[str, str]:
        """Wait until the job is in one of the states (default: any final one); gives its fields."""
        wanted = states or ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY")
        wait_until(lambda: self.state(job_id) in wanted, seconds, f"job {job_id}: {wanted}", self.logs)
        return self.job(job_id)

    def wait_for_restart(self, job_id: str, seconds: float = 60) -> None:
        """Wait until a requeued job runs again (no hurry: its old credential is revoked on the nodes)."""

        def runs_again() -> bool:
            fields = self.job(job_id)
            return fields.get("Restarts") == "1" and fields.get("JobState") not in ("PENDING", "COMPLETING")

        wait_until(runs_again, seconds, f"restart of job {job_id}", self.logs)

    def job_processes(self) -> list[psutil.Process]:
        """Processes that jobs of this cluster started and that still run (batch scripts and tasks)."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            if (
                "SLURM_JOB_ID" in environment
                and environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]
            ):
                found.append(process)
        return found

    def logs(self) -> str:
        return "\n".join(
            f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}"
            for log in self.directory.glob("*.log")
        )

    def _write_configuration(self) -> None:
        ports = free_ports(1 + len(NODES))
        gres = []
        for node in NODES:
            (self.directory / f"spool-{node}").mkdir()
            devices = [self.directory / f"{node}-nvidia{index}" for index in range(GPUS_PER_NODE)]
            for device in devices:
                device.touch()
            gres += [f"NodeName={node} Name=gpu File={device} Flags=nvidia_gpu_env" for device in devices]
        (self.directory / "state").mkdir()
        (self.directory / "gres.conf").write_text("\n".join(gres) + "\n")
        nodes = [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE} "
            f"RealMemory=1000 Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
            for node, port in zip(NODES, ports[1:], strict=True)
        ]
        user = psutil.Process().username()
        text = SLURM_CONF.format(
            hostname=socket.gethostname(),
            directory=self.directory,
            controller_port=ports[0],
            user=user,
            nodes="\n".join(nodes),
        )
        # SLURM believes the node to have what the file says, not what this machine has
        (self.directory / "slurm.conf").write_text(text + "SlurmdParameters=config_overrides\n")
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o400)

    def _munge_options(self) -> list[str]:
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        return [f"--{option}={self.directory / f'munge.{suffix}'}" for option, suffix in files.items()]

    def _start_daemon(self, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        assert path is not None
        output = (self.directory / f"{program}-output.log").open("ab")
        self._daemons.append(
            subprocess.Popen(
                [path, *arguments], env=self.environment, stdout=output, stderr=output, cwd=self.directory
            )
        )

    def _all_idle(self) -> bool:
        shown = self.run("sinfo", "--noheader", "--Node", "--format=%N %T")
        return shown.stdout.split("\n")[: len(NODES)] == [f"{node} idle" for node in NODES]


def wait_until(
    condition: Callable[[], bool], seconds: float, what: str, details: Callable[[], str] = str
) -> None:
    """Poll a condition; fails with what was waited for, and details."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s: {what}\n{details()}")
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    for opened in sockets:
        opened.bind(("127.0.0.1", 0))
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """The cluster, started once per test session."""
    missing = [
        name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    ]
    if missing:
        pytest.skip(f"no SLURM here: {', '.join(missing)} not found (run .ci/packages)")
    # short: the path of a Unix socket has at most 107 characters
    with tempfile.TemporaryDirectory(prefix="vlfit-slurm-") as directory:
        cluster = SlurmCluster(Path(directory))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
