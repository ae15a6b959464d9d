"""Balanced partitions: the contiguous split of layers whose costliest stage is cheapest.

Exact, by dynamic programming over the first layers and the number of stages (the linear partition problem;
Skiena, The Algorithm Design Manual, 8.5). Costs come from outside: measured seconds, FLOPs, bytes, parameters.
"""

import statistics
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from models.errors import UserError
from models.layer import Layer, set_autocast
from models.spec import ModelSpec
from models.state import example_state

By = Literal["flops", "memory", "parameters"]


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

    ``flops``: of forward and backward (backward twice the forward), for a device that is not here to measure
    time on. ``memory``: bytes of weights, gradients and Adam's moments in fp32, and of the tensors kept for
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
                "flops": 3.0 * counter.get_total_flops(),
                "memory": 16.0 * parameters + sum(kept.values()),
                "parameters": float(parameters),
            }[by]
        )
    return costs


def timed_costs(
    spec: ModelSpec, layers: Sequence[Layer], device: torch.device, rows: int = 8, repeats: int = 5
) -> list[float]:
    """Give the seconds that each layer takes for forward and backward of ``rows`` rows on ``device``.

    The median of ``repeats`` runs after one that warms up, in bf16 autocast on a GPU and in fp32 elsewhere. Layers
    of the same modules, sizes and inputs are measured once, so equal blocks cost exactly the same.
    """
    state = example_state(spec, rows, device=device)
    set_autocast(layers, torch.bfloat16 if device.type == "cuda" else None)
    known: dict[tuple, float] = {}
    costs, trained = [], False
    for layer in layers:
        layer.to(device)
        inputs = tuple(tensor.detach() for tensor in state)
        with torch.no_grad():
            state = layer(inputs)
        # Below the first trained parameter there is no backward.
        for tensor in inputs:
            tensor.requires_grad_(trained and tensor.is_floating_point())
        trained |= any(parameter.requires_grad for parameter in layer.parameters())
        kind = (repr(layer.module), trained, *((tensor.shape, tensor.requires_grad) for tensor in inputs))
        if kind not in known:
            seconds = [_seconds(layer, inputs, device) for _ in range(1 + repeats)]
            known[kind] = statistics.median(seconds[1:])
        costs.append(known[kind])
        layer.to("cpu").zero_grad(set_to_none=True)
    return costs


def _seconds(layer: Layer, inputs: tuple[Tensor, ...], device: torch.device) -> float:
    _wait_for(device)
    start = time.perf_counter()
    outputs = [tensor for tensor in layer(inputs) if tensor.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
