"""Two hosts for deepspeed's launcher: network namespaces with a veth pair and an sshd each.

    this namespace ── bridge 10.x.0.254 ─┬─ host a 10.x.0.1, sshd
                                         └─ host b 10.x.0.2, sshd

The hosts share this machine's files and processes, as nodes share a file system, but not its network.
Needs root, iproute2, openssh-server and pdsh (``.ci/packages``). Keys are made for the test.
"""

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from slurm_cluster import wait_until

PROGRAMS = ("ip", "sshd", "ssh-keygen", "pdsh")
SUBNET = f"10.{100 + os.getpid() % 100}.0"
SSHD_CONFIG = """\
Port 22
ListenAddress {address}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/key.pub
PidFile {directory}/sshd-{name}.pid
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
"""


_counter = itertools.count()


class TwoHosts:
    """Addresses ``a`` and ``b``, reachable by ssh with ``environment``; ``cut_off`` takes one away."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.addresses = {"a": f"{SUBNET}.1", "b": f"{SUBNET}.2"}
        # the kernel takes a namespace apart some time after its deletion
        self._tag = f"v{os.getpid() % 10000}{next(_counter)}"
        # ssh reads no configuration but this; pdsh and deepspeed call `ssh` by its name
        (directory / "bin").mkdir()
        wrapper = directory / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {directory}/ssh_config "$@"\n')
        wrapper.chmod(0o755)
        (directory / "ssh_config").write_text(
            f"IdentityFile {directory}/key\nStrictHostKeyChecking no\n"
            "UserKnownHostsFile /dev/null\nLogLevel ERROR\n"
        )
        self.environment = dict(os.environ) | {"PATH": f"{directory / 'bin'}:{os.environ['PATH']}"}

    def start(self) -> None:
        for name in ("key", "host_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.directory / name)], check=True
            )
        self._ip("link", "add", f"{self._tag}br", "type", "bridge")
        self._ip("addr", "add", f"{SUBNET}.254/24", "dev", f"{self._tag}br")
        self._ip("link", "set", f"{self._tag}br", "up")
        Path("/run/sshd").mkdir(exist_ok=True)
        for name, address in self.addresses.items():
            space, link = self._tag + name, f"{self._tag}{name}0"
            self._ip("netns", "add", space)
            self._ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "set", link, "master", f"{self._tag}br", "up")
            self._ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")
            self._ip("-n", space, "link", "set", "lo", "up")
            config = self.directory / f"sshd-{name}.conf"
            config.write_text(SSHD_CONFIG.format(address=address, directory=self.directory, name=name))
            sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
            subprocess.run(["ip", "netns", "exec", space, str(sshd), "-f", str(config)], check=True)
        wait_until(lambda: all(self.reaches(name) for name in self.addresses), 10, "ssh to both hosts")

    def reaches(self, name: str) -> bool:
        command = ["ssh", "-o", "ConnectTimeout=2", self.addresses[name], "true"]
        return subprocess.run(command, env=self.environment, capture_output=True).returncode == 0

    def cut_off(self, name: str) -> None:
        """Take a host off the network; what runs on it goes on."""
        self._ip("link", "set", f"{self._tag}{name}0", "down")

    def processes(self, *names: str) -> list[psutil.Process]:
        """Every process in the namespaces of the hosts (default: of both), but for their sshd."""
        found = []
        for name in names or self.addresses:
            listed = subprocess.run(
                ["ip", "netns", "pids", self._tag + name], capture_output=True, text=True
            ).stdout.split()
            for pid in listed:
                try:
                    process = psutil.Process(int(pid))
                    if process.name() != "sshd":
                        found.append(process)
                except psutil.NoSuchProcess:
                    continue
        return found

    def stop(self) -> None:
        for name in self.addresses:
            listed = subprocess.run(["ip", "netns", "pids", self._tag + name], capture_output=True, text=True)
            for pid in listed.stdout.split():
                if psutil.pid_exists(int(pid)):
                    psutil.Process(int(pid)).kill()
            subprocess.run(["ip", "link", "del", f"{self._tag}{name}0"], capture_output=True)
            subprocess.run(["ip", "netns", "del", self._tag + name], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self._tag}br"], capture_output=True)

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts of their own for each test: one of them is cut off in some."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"no two hosts here: {', '.join(missing) or 'not root'} (run .ci/packages)")
    if subprocess.run(["ip", "netns", "add", "vlfit-probe"], capture_output=True).returncode != 0:
        pytest.skip("no two hosts here: network namespaces are not allowed")
    subprocess.run(["ip", "netns", "del", "vlfit-probe"], check=True)
    with tempfile.TemporaryDirectory(prefix="vlfit-hosts-") as directory:
        hosts = TwoHosts(Path(directory))
        try:
            hosts.start()
            yield hosts
        finally:
            hosts.stop()
