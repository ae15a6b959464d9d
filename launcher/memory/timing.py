"""Predicted time of one optimizer step: a roofline per layer, the pipeline's real order, collectives, optimizer.

    layer       max(FLOPs / rate, bytes of matrix products / bandwidth) + other bytes / their rate, on a GPU not
                below the host's time to start its operators (Williams et al., 2009, Roofline)
    recompute   one more forward of the layer, in its backward
    pipeline    the order of FairScale's Pipe (all chunks forward, loss, all chunks backward; Huang et al., 2019,
                GPipe) and of DeepSpeed's (1F1B; Narayanan et al., 2019, PipeDream), played through with each
                stage's own times, so that unequal stages wait as they really do
    collectives ring: all-reduce of n bytes over r ranks 2 (r-1)/r n / bandwidth, gather and scatter half of it
                (Thakur et al., 2005), plus a latency for each doubling of the ranks. Over several nodes the
                slowest hop counts: a device's link, or its node's network shared by the groups that cross it.
    optimizer   bytes of its passes over weights, gradients and state / memory bandwidth
    offload     gradients and weights over PCIe, the update at the host's bandwidth (Ren et al., 2021)

Loading of data, evaluation and saving are left out. Gradients' collectives are not overlapped with backward,
except ZeRO-3's, whose gathers and reductions run beside compute (``overlap_comm`` is on there by default):
``HIDDEN`` of their time at best. Its hooks around every module double the host's work.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from launcher.config.training import Precision
from launcher.memory.hardware import Hardware
from launcher.memory.strategy import Strategy
from launcher.memory.table import Cost, LayerRow, LayerTable

OPERATORS = 45
"""Operators in the forward pass of a layer (a fusion layer: 59 events in its trace); backward has twice as many."""

UPDATE_BYTES = {True: 40, False: 92}
"""Bytes moved for each fp32 parameter by clipping and AdamW: fused, or one operator after the other.

Norm (read g) and clipping (read and write g): 12. Fused: read p, g, m, v and write p, m, v: 28. torch's own,
_single_tensor_adamw: 20 reads and writes."""
HIDDEN = 0.5
"""Assumption: the share of ZeRO-3's collectives that compute can hide; the rest waits for it, or slows it down."""
COPY_BYTES = 8
"""More with 16 bits: gradients to fp32 (2 + 4), weights back (2)."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices."""

    hardware: Hardware
    nodes: int
    per_node: int

    @property
    def devices(self) -> int:
        """All of them."""
        return self.nodes * self.per_node

    def bandwidth(self, ranks: int, spread: int) -> float:
        """Of a ring over ``ranks`` devices, ``spread`` devices apart (1: neighbours)."""
        hardware = self.hardware
        if ranks * spread <= self.per_node:
            return hardware.link_bandwidth
        crossing = min(spread, self.per_node)  # groups that use a node's network at the same time
        return min(hardware.link_bandwidth, hardware.network_bandwidth / crossing)

    def collective(self, size: float, ranks: int, spread: int = 1, passes: int = 1, calls: int = 1) -> float:
        """Seconds of an all-gather or reduce-scatter of ``size`` bytes in ``calls``; ``passes=2``: an all-reduce."""
        if ranks == 1 or not size:
            return 0.0
        moved = passes * (ranks - 1) / ranks * size / self.bandwidth(ranks, spread)
        return moved + passes * calls * math.ceil(math.log2(ranks)) * self.hardware.latency_seconds


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by what they are for."""

    compute: float
    recompute: float
    bubble: float
    """Devices waiting for other stages, on average."""
    communication: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.recompute + self.bubble + self.communication + self.optimizer

    def as_json(self) -> dict[str, float]:
        """By part."""
        return {name: round(value, 6) for name, value in vars(self).items()}


def pass_seconds(work: Cost, hardware: Hardware, precision: Precision, operators: int) -> float:
    """Time of one pass through a layer."""
    bandwidth = hardware.memory_bandwidth
    device = max(work.flops / hardware.flops(precision), work.matmul_bytes / bandwidth)
    device += work.other_bytes / hardware.elementwise(precision)
    host = operators * hardware.operator_seconds
    return device + host if hardware.device_type == "cpu" else max(device, host)


class LayerSeconds:
    """Seconds of each layer of a table on a device, as sums from the first layer up."""

    def __init__(self, table: LayerTable, hardware: Hardware) -> None:
        self.names = list(table.layers)
        self.hardware = hardware
        known: dict[int, tuple[float, float]] = {}
        for row in (*table.layers.values(), table.loss):
            if id(row) not in known:
                known[id(row)] = (
                    pass_seconds(row.forward, hardware, table.precision, OPERATORS),
                    pass_seconds(row.backward, hardware, table.precision, 2 * OPERATORS),
                )
        pairs = [known[id(row)] for row in table.layers.values()]
        self.forward = [forward for forward, _ in pairs]
        self.backward = [backward for _, backward in pairs]
        self.loss = sum(known[id(table.loss)])
        self.parameters = [sum(row.parameters) for row in table.layers.values()]
        self.boundary = [_boundary(row) for row in table.layers.values()]

    @cached_property
    def sums(self) -> tuple[list[float], list[float]]:
        """Forward and backward of the first n layers."""
        return [0.0, *accumulate(self.forward)], [0.0, *accumulate(self.backward)]

    @cached_property
    def parameter_sums(self) -> list[int]:
        """Parameters of the first n layers."""
        return [0, *accumulate(self.parameters)]

    def largest_stage(self, bounds: Sequence[int]) -> int:
        """Parameters of the stage that has most."""
        sums = self.parameter_sums
        return max(sums[end] - sums[first] for first, end in pairwise(bounds))

    def stages(self, bounds: Sequence[int], recompute: frozenset[str]) -> list[tuple[float, float, float]]:
        """Forward, backward and recomputation of each stage for one pass."""
        forward, backward = self.sums
        again = [0.0] * (len(bounds) - 1)
        if recompute:
            stage = 0
            for index, name in enumerate(self.names):
                stage += index == bounds[stage + 1]
                if name in recompute:
                    again[stage] += self.forward[index]
        return [
            (forward[end] - forward[first], backward[end] - backward[first], again[number])
            for number, (first, end) in enumerate(pairwise(bounds))
        ]


def step_time(strategy: Strategy, seconds: LayerSeconds, cluster: Cluster) -> StepTime:
    """Predict one optimizer step; ``seconds`` are of ``strategy.rows`` rows in its precision."""
    stages = seconds.stages(strategy.stage_bounds, strategy.recompute)
    micros = strategy.chunks * strategy.accumulation_steps
    compute = micros * sum(forward + backward for forward, backward, _ in stages) / len(stages)
    again = micros * sum(recompute for *_, recompute in stages) / len(stages)
    losses = strategy.accumulation_steps if strategy.engine == "fairscale" else micros
    loss = losses * seconds.loss / len(stages)
    busy = compute + again + loss
    elapsed = _elapsed(strategy, stages, seconds, cluster)
    # On the CPU a process's stages share its cores: nothing runs beside anything.
    if strategy.engine == "fairscale" and cluster.hardware.device_type == "cpu":
        elapsed = busy = busy * len(stages)
        compute, again, loss = (part * len(stages) for part in (compute, again, loss))
    communication = _communication(strategy, seconds, cluster, elapsed)
    update = _update(strategy, seconds, cluster)
    return StepTime(compute + loss, again, max(0.0, elapsed - busy), communication, update)


def gpipe(stages: Sequence[tuple[float, float]], chunks: int, hop: float, loss: float) -> float:
    """Seconds of FairScale's Pipe: (forward, backward) of each stage, seconds of a transfer between stages.

    stage 0   F0 F1 F2 .. .. .. .. B2 B1 B0        every cell starts when its left neighbour and the cell above
    stage 1   .. F0 F1 F2 L  B2 B1 B0              (in the backward pass: below) are done
    """

    def wave(times: Sequence[float]) -> float:
        ends = [0.0] * chunks
        for number, each in enumerate(times):
            free = 0.0
            for chunk in range(chunks):
                free = max(free, ends[chunk] + (hop if number else 0.0)) + each
                ends[chunk] = free
        return ends[-1]

    return (
        wave([forward for forward, _ in stages]) + loss + wave([backward for _, backward in reversed(stages)])
    )


def one_forward_one_backward(stages: Sequence[tuple[float, float]], micros: int, hop: float) -> float:
    """Seconds of DeepSpeed's schedule (runtime/pipe/schedule.py, TrainSchedule); arguments as ``gpipe``.

    stage 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3        stage s runs as many forwards ahead as stages follow it
    stage 1   .. F0 B0 F1 B1 F2 B2 F3 B3
    """
    count = len(stages)
    if micros > 4 * count + 4:  # periodic from there on
        long, short = (one_forward_one_backward(stages, 4 * count + n, hop) for n in (4, 3))
        return long + (micros - 4 * count - 4) * (long - short)
    orders = []
    for number in range(count):
        ahead = min(micros, count - 1 - number)
        order = [(True, micro) for micro in range(ahead)]
        for micro in range(micros - ahead):
            order += [(True, ahead + micro), (False, micro)]
        orders.append(order + [(False, micro) for micro in range(micros - ahead, micros)])
    ends: dict[tuple[bool, int, int], float] = {}
    free, position = [0.0] * count, [0] * count
    moved = True
    while moved:
        moved = False
        for number, order in enumerate(orders):
            while position[number] < len(order):
                forward, micro = order[position[number]]
                other = number - 1 if forward else number + 1
                ready = 0.0
                if 0 <= other < count:
                    found = ends.get((forward, other, micro))
                    if found is None:
                        break
                    ready = found + hop
                free[number] = max(free[number], ready) + stages[number][0 if forward else 1]
                ends[forward, number, micro] = free[number]
                position[number] += 1
                moved = True
    return max(free)


def _elapsed(
    strategy: Strategy,
    stages: Sequence[tuple[float, float, float]],
    seconds: LayerSeconds,
    cluster: Cluster,
) -> float:
    """Wall time of forward and backward of all micro-batches."""
    pairs = [(forward, backward + again) for forward, backward, again in stages]
    if len(pairs) == 1:
        return strategy.accumulation_steps * (sum(pairs[0]) + seconds.loss)
    moved = max(seconds.boundary[bound - 1] for bound in strategy.stage_bounds[1:-1])
    if strategy.engine == "deepspeed":
        # Stages are data_world ranks apart.
        hop = moved / cluster.bandwidth(2, strategy.data_world) + cluster.hardware.latency_seconds
        last = (pairs[-1][0], pairs[-1][1] + seconds.loss)
        micros = strategy.chunks * strategy.accumulation_steps
        return one_forward_one_backward([*pairs[:-1], last], micros, hop)
    hop = moved / cluster.hardware.link_bandwidth + cluster.hardware.latency_seconds
    once = gpipe(pairs, strategy.chunks, hop, seconds.loss)
    # One process starts the operators of all stages.
    passes = 3 * len(seconds.names) + len(strategy.recompute)
    host = strategy.chunks * passes * OPERATORS * cluster.hardware.operator_seconds
    return strategy.accumulation_steps * max(once, host)


def _communication(strategy: Strategy, seconds: LayerSeconds, cluster: Cluster, elapsed: float) -> float:
    """Gradients and weights between replicas, beyond what runs beside ``elapsed`` seconds of compute."""
    ranks, zero = strategy.data_world, strategy.zero
    if ranks == 1:
        return 0.0
    # Under FairScale the replicas of a stage are as many devices apart as there are stages; DeepSpeed's adjoin.
    spread = strategy.stages if strategy.engine == "fairscale" else 1
    width = 2 if strategy.precision in ("fp16", "bf16") and strategy.engine != "fairscale" else 4
    # DDP reduces the stages of FairScale's process one after the other.
    bounds = strategy.stage_bounds if strategy.engine == "deepspeed" else (0, len(seconds.names))
    largest = seconds.largest_stage(bounds)
    size = width * largest
    calls = max(1, largest // max(1, zero.reduce_bucket_size))
    micros = strategy.accumulation_steps
    if zero.stage == 0:
        return cluster.collective(size, ranks, spread, passes=2, calls=calls)
    gather = cluster.collective(size, ranks, spread, calls=calls)
    if zero.stage == 1:  # the gradients are reduced once, the new weights gathered once
        return 2 * gather
    if zero.stage == 2:  # every micro-batch's gradients are reduced, for no rank keeps all
        return (micros + 1) * gather
    # ZeRO-3: gathered for forward and backward, and reduced, layer by layer.
    each = cluster.collective(size, ranks, spread, calls=len(seconds.names))
    whole = 3 * micros * each
    hooks = micros * 6 * len(seconds.names) * OPERATORS * cluster.hardware.operator_seconds
    return max(whole - min(HIDDEN * whole, elapsed), hooks - elapsed)


def _update(strategy: Strategy, seconds: LayerSeconds, cluster: Cluster) -> float:
    """The optimizer's step, and what offloading moves for it."""
    hardware, zero = cluster.hardware, strategy.zero
    owned = seconds.largest_stage(strategy.stage_bounds) / (strategy.data_world if zero.stage else 1)
    half = strategy.precision in ("fp16", "bf16") and strategy.engine != "fairscale"
    bytes_each = UPDATE_BYTES[strategy.fused_optimizer] + (COPY_BYTES if half else 0)
    if not zero.offload_optimizer:
        return owned * bytes_each / hardware.memory_bandwidth
    width = 2 if half else 4
    micros = strategy.accumulation_steps
    moved = (micros if zero.stage > 1 else 1) * width * owned + width * owned  # gradients down, weights up
    if zero.offload_param:
        moved += 2 * micros * width * owned
    on_host = owned * cluster.per_node * UPDATE_BYTES[True] / hardware.host_bandwidth
    return moved / hardware.pcie_bandwidth + on_host


def _boundary(row: LayerRow) -> int:
    """Bytes that cross to the next layer."""
    return sum(row.plain.outputs) if row.plain else row.boundary_bytes
