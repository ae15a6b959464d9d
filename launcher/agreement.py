"""Plain values that ranks exchange; every function is collective over all ranks."""

from typing import Any

import torch
import torch.distributed as dist


def largest_of_all_ranks(device: torch.device, *numbers: int) -> list[int]:
    """Give the largest of each number over all ranks."""
    if dist.get_world_size() == 1:
        return list(numbers)
    agreed = torch.tensor(numbers, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return agreed.tolist()


def from_rank_0(value: Any) -> Any:
    """Give rank 0's value; what the others pass does not count."""
    shared = [value]
    dist.broadcast_object_list(shared, 0)
    return shared[0]


def from_all_ranks(value: Any) -> list[Any]:
    """Give the values of all ranks, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
