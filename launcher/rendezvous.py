"""Where rank 0 of a SLURM job can be reached: ``python -m launcher.rendezvous`` prints ADDRESS:PORT.

Run on the first node of the job. Its name is no safe answer: it may not resolve, and Debian maps it to
127.0.1.1 on the node itself. The port follows from the job id and is tried before it is used.
"""

import os
import socket
import sys
from collections.abc import Iterable, Mapping

from launcher.distributed import FIRST_PORT, LAST_PORT, is_loopback, port_of_job
from launcher.hostlist import expand_hostlist
from models.errors import UserError

INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def choose_address(
    resolved: Iterable[str], interfaces: Mapping[str, list[str]], wanted_interface: str | None
) -> str:
    """Choose an address of this node that other nodes can reach; raises UserError if it has none.

    ``resolved`` are the addresses of the node's name, best first; ``interfaces`` the IPv4 addresses of
    each interface that is up. A wanted interface (NCCL's: the beginning of its name) decides alone.
    """
    if wanted_interface:
        names = [name for name in interfaces if name.startswith(wanted_interface.lstrip("=").split(",")[0])]
        if not names:
            raise UserError(
                f"no interface {wanted_interface} ({' or '.join(INTERFACE_VARIABLES)}) is up on "
                f"{socket.gethostname()}; there are {', '.join(interfaces)}"
            )
        return interfaces[names[0]][0]
    own = [address for addresses in interfaces.values() for address in addresses]
    for address in [*(known for known in resolved if known in own), *own]:
        if not is_loopback(address) and not address.startswith("169.254."):
            return address
    raise UserError(
        f"{socket.gethostname()} has no address that other nodes can reach (interfaces: "
        f"{', '.join(interfaces) or 'none'}); set MASTER_ADDR in the script"
    )


def choose_port(address: str, job_id: int, tries: int = 20) -> int:
    """Give the job's port, or a later one where something else listens on it already (says so on stderr)."""
    for attempt in range(tries):
        port = port_of_job(job_id, attempt)
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as test:
            test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store of torch does
            try:
                test.bind((address, port))
                test.listen(1)
            except OSError as error:
                print(f"port {port} of {address} cannot be used ({error.strerror}); next", file=sys.stderr)
                continue
        return port
    raise UserError(f"{address}: none of {tries} ports from {FIRST_PORT} to {LAST_PORT} could be opened")


def rendezvous(environ: Mapping[str, str]) -> tuple[str, int]:
    """Address and port of rank 0 for the SLURM job of this environment."""
    nodes = expand_hostlist(environ["SLURM_JOB_NODELIST"])
    if environ.get("MASTER_ADDR"):
        address = environ["MASTER_ADDR"]
    elif len(nodes) == 1:
        address = "127.0.0.1"
    else:
        wanted = next((environ[name] for name in INTERFACE_VARIABLES if environ.get(name)), None)
        address = choose_address(_resolve(nodes[0]), _interfaces(), wanted)
    return address, choose_port(address, int(environ["SLURM_JOB_ID"]))


def interface_towards(address: str) -> str | None:
    """Name of this node's interface that leads to an address; None where it cannot be told.

    On several nodes gloo needs it as GLOO_SOCKET_IFNAME: by default it takes the address that the node's
    own name resolves to, which in many /etc/hosts is 127.0.0.1 ("connectFullMesh failed", torch 2.14).
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # no packet is sent
            own = probe.getsockname()[0]
    except OSError:
        return None
    return next((name for name, addresses in _interfaces().items() if own in addresses), None)


def _resolve(name: str) -> list[str]:
    try:
        return [found[4][0] for found in socket.getaddrinfo(name, None, socket.AF_INET)]  # type: ignore[misc]
    except OSError:
        return []


def _interfaces() -> dict[str, list[str]]:
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    addresses = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }
    return {name: found for name, found in addresses.items() if found}


def main() -> int:
    try:
        address, port = rendezvous(os.environ)
    except UserError as error:
        print(f"rendezvous: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{address}:{port}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
