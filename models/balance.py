"""Balanced partitions: the contiguous split of layers whose costliest stage is cheapest.

Exact, by dynamic programming over the first layers and the number of stages (the linear partition problem;
Skiena, The Algorithm Design Manual, 8.5). Costs come from outside: measured seconds, FLOPs, bytes, parameters.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

import torch

from models.errors import UserError
from models.layer import Layer
from models.spec import ModelSpec
from models.state import example_state

By = Literal["time", "memory", "parameters"]


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Give the number of layers of each stage so that the largest sum of costs is minimal.

    Every stage has at least one layer. Raises UserError for more stages than layers, or none.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise UserError(f"{stages} stages cannot be made of {count} layers")
    sums = [0.0, *accumulate(costs)]
    # best[s][n]: the smallest possible largest stage when the first n layers form s stages
    best = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                worst = max(best[stage - 1][start], sums[end] - sums[start])
                if worst < best[stage][end]:
                    best[stage][end], cut[stage][end] = worst, start
    bounds = [count]
    for stage in range(stages, 0, -1):
        bounds.append(cut[stage][bounds[-1]])
    return [end - start for start, end in pairwise(reversed(bounds))]


def layer_costs(spec: ModelSpec, layers: Sequence[Layer], by: By, rows: int = 8) -> list[float]:
    """Give each layer's cost for ``rows`` rows, from shapes alone (layers on the meta device).

    ``time``: FLOPs of forward and backward (backward twice the forward), which decide time on one kind of
    device. ``memory``: bytes of weights, gradients and Adam's moments in fp32, and of the tensors kept for
    backward. ``parameters``: their number.
    """
    from torch.utils.flop_counter import FlopCounterMode

    state = example_state(spec, rows, device="meta")
    costs: list[float] = []
    for layer in layers:
        parameters = sum(parameter.numel() for parameter in layer.parameters())
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept, layer: Layer = layer) -> torch.Tensor:
            if not any(tensor is parameter for parameter in layer.parameters()):
                kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            FlopCounterMode(display=False) as counter,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            state = layer(state)
        costs.append(
            {
                "time": 3.0 * counter.get_total_flops(),
                "memory": 16.0 * parameters + sum(kept.values()),
                "parameters": float(parameters),
            }[by]
        )
    return costs
