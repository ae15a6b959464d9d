"""ZeRO stages 1 and 2: flat groups, a partition of the state per rank, gradients through a bucket.

From deepspeed/runtime/zero/stage_1_and_2.py (0.19.8). All trained parameters lie in one flat buffer, in the order of
the model, and each rank updates one equal stretch of it:

    flat buffer   [ p0 | p1 |  p2  | p3 |     p4     | p5 | padding ]
    partitions    [      rank 0     |      rank 1      |   rank 2    ]      p2 belongs to two of them, p4 as well

    stage 2       a gradient is copied into the bucket as soon as it is finished, and its own storage freed; a full
                  bucket is reduced; what is this rank's own goes on into ``grads_in_partition``
    stage 1       the same, but after the last backward pass; until then every gradient is there in full
"""

from collections.abc import Sequence

from launcher.memory.ledger import Ledger
from launcher.memory.strategy import Strategy
from launcher.memory.weights import (
    OPTIMIZER_STATES,
    AlwaysThere,
    Key,
    Parameters,
    build_model,
    element_bytes,
    optimizer_temporary,
)


class FlatWeights(AlwaysThere):
    """One rank's weights under ZeRO 1 or 2; see ``launcher.memory.weights.Weights``."""

    def __init__(self, ledger: Ledger, parameters: Parameters, strategy: Strategy, rank: int) -> None:
        self.ledger, self.parameters, self.strategy = ledger, parameters, strategy
        self.zero, self.world, self.rank = strategy.zero, strategy.data_world, rank
        self.width = element_bytes(strategy)
        self.states = OPTIMIZER_STATES.get(strategy.optimizer, 2)
        self.communicated = 2 if strategy.precision.startswith("autocast") else self.width
        align = 2 * self.world  # nccl_start_alignment_factor
        self.flat = -(-parameters.trained_elements // align) * align
        self.partition = self.flat // self.world
        self.elements = dict(zip(parameters.trained_keys, parameters.trained, strict=True))
        self.owners: dict[Key, tuple[int, int]] = {}
        offset = 0
        for key, size in self.elements.items():
            self.owners[key] = offset // self.partition, (offset + size - 1) // self.partition
            offset += size
        self.own_elements = sum(size for key, size in self.elements.items() if self._owns(key))
        self.seen: set[Key] = set()
        self.bucket: list[Key] = []
        self.oversized: list[int] = []
        self.ready = self.has_partition = self.accumulated = False

    @property
    def _host(self) -> bool:
        return self.zero.offload_optimizer

    def load(self) -> None:
        build_model(self.ledger, self.parameters, self.width)

    def initialise(self) -> None:
        self.ledger.begin("initialise", "optimizer")
        self.ledger.add("parameters", self.width * self.flat)
        self.ledger.add("parameters", -self.width * self.parameters.trained_elements)
        if self._host:
            return
        self.ledger.spike("temporary", (self.width + 4 * (self.width == 2)) * self.partition)
        self.ledger.add("master weights", 4 * self.partition)
        self.ledger.spike("gradients", 4 * self.partition)
        self.ledger.add("optimizer state", 4 * self.states * self.partition)

    @property
    def host_bytes(self) -> int:
        """Offloaded: masters, their gradients and state in fp32, and a buffer of the masters in 16 bits."""
        return (4 * (2 + self.states) + self.width) * self.partition if self._host else 0

    def on_gradient(self, layer: str, index: int, size: int) -> None:
        self._set_up()
        key = (layer, index)
        if self.zero.stage == 1:
            if key not in self.seen:
                self.seen.add(key)
                self.ledger.add("gradients", size)
            if not self.zero.overlap_comm:
                return
        else:
            self.ledger.add("gradients", size)
        self._take(key)

    def after_backward(self, boundary: bool) -> None:
        if self.zero.stage == 1:
            if not boundary:
                return
            self.ledger.begin("step", "reduce gradients")
            for key in self.elements:
                if key in self.seen and not self.zero.overlap_comm:
                    self._take(key)
        self._reduce()
        for size in self.oversized:
            self.ledger.add("gradients", -size)
        self.oversized.clear()
        self.seen.clear()
        if self.has_partition and self.accumulated:  # added to what earlier micro-batches left
            self.ledger.add("gradients", -self.width * self.own_elements)
        self.accumulated, self.has_partition = self.accumulated or self.has_partition, False
        self.ready = False
        self.ledger.add("communication", -self.ledger.held("communication"))

    def step(self) -> None:
        self.ledger.begin("step", "optimizer")
        self.accumulated = False
        if self._host:
            self.ledger.add("gradients", -self.ledger.held("gradients"))
            return
        self.ledger.add("temporary", self.width * self.partition)
        if self.width == 2:
            self.ledger.add("temporary", 4 * self.partition)
            self.ledger.add("temporary", -2 * self.partition)
        self.ledger.add("gradients", -self.ledger.held("gradients"))
        self.ledger.spike("temporary", optimizer_temporary(self.strategy, [self.partition]))
        self.ledger.add("temporary", -self.ledger.held("temporary"))

    def _set_up(self) -> None:
        """Buffers of the size of the JSON, however small the model; two with overlap_comm."""
        if not self.ready:
            self.ready = True
            # Under autocast, what modules compute in 16 bits is reduced in 16 bits, and has a bucket of its own.
            count = (2 if self.zero.overlap_comm else 1) * (1 + (self.communicated != self.width))
            self.ledger.add("communication", count * self.width * self.zero.reduce_bucket_size)

    def _owns(self, key: Key) -> bool:
        first, last = self.owners[key]
        return first <= self.rank <= last

    def _take(self, key: Key) -> None:
        """Put a gradient into the bucket; one that is larger than any bucket keeps its own storage."""
        size = self.elements[key]
        if sum(self.elements[other] for other in self.bucket) + size > self.zero.reduce_bucket_size:
            self._reduce()
        self.bucket.append(key)
        if size <= self.zero.reduce_bucket_size:
            self.ledger.add("gradients", -self.width * size)

    def _reduce(self) -> None:
        """Reduce what the bucket holds, and copy this rank's own gradients on."""
        if not self.bucket:
            return
        size = sum(self.elements[key] for key in self.bucket)
        copies = 0 if _one_owner([self.owners[key] for key in self.bucket]) else self.width
        if self.communicated != self.width:
            copies += self.communicated
        self.ledger.spike("communication", copies * size)
        for key in self.bucket:
            large = self.elements[key] > self.zero.reduce_bucket_size
            own = self._owns(key)
            if own and not self.has_partition and not self._host:
                self.has_partition = True
                self.ledger.add("gradients", self.width * self.own_elements)
            if large and (own or self.zero.stage == 2):
                self.ledger.add("gradients", -self.width * self.elements[key])
            elif large:
                self.oversized.append(self.width * self.elements[key])
        self.bucket.clear()


def _one_owner(owners: Sequence[tuple[int, int]]) -> bool:
    """Slices of one rank are one stretch of the bucket, which is reduced in place; others are put together first."""
    return len({rank for pair in owners for rank in pair}) == 1
