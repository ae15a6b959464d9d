"""The devices that one rank drives: a GPU, or under FairScale's pipe a group of them, one for each stage."""

import os

import torch

from launcher.distributed import Distributed
from models.errors import UserError


def claim_devices(wanted: str | None, distributed: Distributed, count: int) -> list[torch.device]:
    """Give this rank's ``count`` devices: CUDA where there is one, the CPU otherwise.

    To be called before anything asks torch for CUDA, which reads CUDA_VISIBLE_DEVICES only once. Raises
    UserError, with numbers, where the node has too few GPUs.
    """
    if wanted == "cpu":
        # DeepSpeed asks this variable before anything else.
        os.environ["DS_ACCELERATOR"] = "cpu"
        return [torch.device("cpu")] * count
    distributed = distributed.widened(os.environ, count)
    if distributed.visible_devices is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    elif distributed.visible_devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(distributed.visible_devices)
    if not torch.cuda.is_available():
        if wanted == "cuda":
            raise UserError(
                "--device cuda: torch sees no CUDA device here; use --device cpu or see `vlfit doctor`"
            )
        return [torch.device("cpu")] * count
    first, found = distributed.first_device(count), torch.cuda.device_count()
    if first + count > found:
        needed = distributed.local_world_size * count
        raise UserError(
            f"{distributed.local_world_size} process(es) × {count} GPU(s) each need {needed} GPUs on this node; "
            f"{found} are visible"
        )
    devices = [torch.device("cuda", first + index) for index in range(count)]
    torch.cuda.set_device(devices[0])
    return devices
