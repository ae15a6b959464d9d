"""The process group of a run: NCCL on CUDA, gloo on the CPU."""

import os
import socket

import torch

from launcher.distributed import Distributed
from launcher.rendezvous import interface_towards


def start_process_group(distributed: Distributed, device: torch.device) -> None:
    """Initialise torch.distributed through DeepSpeed: NCCL on CUDA, gloo on CPU."""
    import deepspeed

    if distributed.world_size == 1 and not distributed.master_port:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= distributed.environment() | {"MASTER_PORT": str(port)}
    else:
        os.environ |= distributed.environment()
    if distributed.nodes > 1:
        interface = interface_towards(distributed.master_address)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if device.type == "cuda":
        # DeepSpeed takes it for the number of the GPU; a task of SLURM may see its own GPU only, as number 0.
        os.environ["LOCAL_RANK"] = str(device.index)
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
