"""ZeRO stage 3: every parameter split over the ranks, gathered when a module needs it, freed when its next use is far.

From deepspeed/runtime/zero (0.19.8): ``stage3.py``, ``partition_parameters.py``, ``partitioned_param_coordinator.py``.
From the second micro-batch on the order of the modules is known, and every module call fetches ahead:

    prefetch   up to ``prefetch_bucket_size`` elements a call, all together at most ``max_live_parameters``; one
               module after the other calls, so that the limit is the second one
    gather     a group of parameters lands in one buffer (rank after rank) and is copied from there into a tensor
               for each parameter when the first of them is used; the buffer goes when the last of them is
    release    after a module's forward, what is not used again within ``max_reuse_distance`` elements; after its
               backward, everything but parameters of at most ``persistence_threshold`` elements, which stay

    gradient   copied into a bucket, its own storage freed; a full bucket is put together rank by rank (one more
               copy), reduced and scattered; this rank's stretch is added to a flat buffer that stays
    step       the gradients flattened once more, in fp32; the optimizer; persistent parameters gathered again

One rank gathers nothing: its part is the parameter. Gloo's collectives copy what they are given (torch 2.14,
ProcessGroupGloo.cpp: ``AsyncAllgatherWork``, ``reduce_scatter_tensor_coalesced``); NCCL's do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.memory.ledger import Ledger
from launcher.memory.strategy import Strategy
from launcher.memory.weights import (
    OPTIMIZER_STATES,
    Key,
    Parameters,
    build_model,
    element_bytes,
    optimizer_temporary,
)


@dataclass
class Gathered:
    """Parameters that were gathered together."""

    waiting: set[Key]
    """Not used yet: the first use makes the copies, the last lets go of the buffer."""
    buffer_bytes: int
    copied: bool = False


@dataclass
class Bucket:
    """Gradients that are reduced together."""

    keys: list[Key] = field(default_factory=list)
    elements: int = 0


class ShardedWeights:
    """One rank's weights under ZeRO 3; see ``launcher.memory.weights.Weights``."""

    def __init__(self, ledger: Ledger, parameters: Parameters, strategy: Strategy, layers: list[str]) -> None:
        self.ledger, self.parameters, self.strategy, self.layers = ledger, parameters, strategy, layers
        self.zero, self.world = strategy.zero, strategy.data_world
        self.width = element_bytes(strategy)
        self.states = OPTIMIZER_STATES.get(strategy.optimizer, 2)
        self.gloo = strategy.device_type == "cpu"
        self.autocast = strategy.precision.startswith("autocast")
        self.elements = {(name, index): size for name, index, size, _ in parameters.all}
        self.trained = set(parameters.trained_keys)
        self.persistent = {
            key for key, size in self.elements.items() if size <= self.zero.persistence_threshold
        }
        self.owned = sum(map(self._part, self.elements.values()))
        self.partition = sum(self._part(self.elements[key]) for key in self.trained)
        self.of = {name: [(name, i) for i in range(len(parameters.of[name]))] for name in layers}
        self.live: dict[Key, int] = {}
        """Gathered parameters and their bytes, once copied out of their group's buffer."""
        self.groups: dict[Key, Gathered] = {}
        self.queue: list[Key] = []
        self.available = 0
        self.buckets: dict[int, Bucket] = {2: Bucket(), 4: Bucket()}
        """By the bytes of an element on its way; under autocast both are used."""
        self.uses: list[str] = []
        self.place = 0

    def _communicated(self, key: Key) -> int:
        """Bytes of an element on its way between ranks: 2 under autocast for what modules compute in 16 bits."""
        return 2 if self.autocast and key in self.parameters.lowered else self.width

    def _part(self, elements: int) -> int:
        """Elements of a parameter on one rank, padding included."""
        return -(-elements // self.world)

    @property
    def _host(self) -> bool:
        return self.zero.offload_optimizer

    @property
    def host_bytes(self) -> int:
        """Offloaded: masters, gradients and state in fp32; the parts of the parameters."""
        state = (4 * (2 + self.states) + self.width) * self.partition if self._host else 0
        return state + (self.width * self.owned if self.zero.offload_param else 0)

    def load(self) -> None:
        build_model(self.ledger, self.parameters, self.width)

    def initialise(self) -> None:
        ledger, width = self.ledger, self.width
        ledger.begin("initialise", "partition")
        here = 0 if self.zero.offload_param else width * self.owned
        if here:
            self.ledger.spike("parameters", width * self._part(self.parameters.largest_of_all))
        ledger.add("parameters", here - width * self.parameters.elements)
        ledger.spike("parameters", here)  # defragment: one flat buffer of all parts
        ledger.begin("initialise", "optimizer")
        if not self._host:
            if width == 2:
                ledger.spike("temporary", 8 * self.partition)
            ledger.add("master weights", 4 * self.partition)
            largest = min(self.zero.sub_group_size * self.world, self.parameters.trained_elements)
            ledger.spike("gradients", 4 * largest)
        ledger.add("communication", self._bucket_bytes())
        if not self._host:
            ledger.add("gradients", width * self.partition)
        self._gather_persistent()
        if not self._host:
            ledger.add("optimizer state", 4 * self.states * self.partition)

    def _bucket_bytes(self) -> int:
        """Of the size of the JSON, however small the model: one for each type that gradients are reduced in."""
        kinds = {self._communicated(key) for key in self.trained}
        return sum(kinds) * self.zero.reduce_bucket_size

    def _gather_persistent(self) -> None:
        if self.world == 1 and not self.zero.offload_param:
            return
        for key in self.persistent:
            self.live[key] = self.width * self._part(self.elements[key]) * self.world
            self.ledger.add("parameters", self.live[key])

    def before_micro_batch(self) -> None:
        """The order of use is known: forward through the layers, then back."""
        self.uses = [*self.layers, *reversed(self.layers)]
        self.place = 0
        self.queue = [key for name in self.uses for key in self.of[name]]
        self.available = 0
        self._prefetch(calls=1)  # by the module that holds the layers

    def before_forward(self, layer: str) -> None:
        self._use(layer)

    def after_forward(self, layer: str) -> None:
        self._release(layer)

    def before_backward(self, layer: str) -> None:
        self._use(layer)

    def _use(self, layer: str) -> None:
        """Wait for a layer's parameters, and fetch those of the next."""
        self.place += 1
        keys = self.of[layer]
        self._fetch([key for key in keys if key not in self.live and key not in self.groups])
        for key in keys:
            self._wait(key)
        del self.queue[: len(self.of[layer])]
        self._prefetch()

    def _prefetch(self, calls: int | None = None) -> None:
        """Fetch ahead; ``calls``: of so many modules only."""
        ahead: list[Key] = []
        size = 0
        groups: list[int] = []
        for key in self.queue:
            if self.available >= self.zero.max_live_parameters or len(groups) == calls:
                break
            if key in self.live or key in self.groups or key in ahead:
                continue
            ahead.append(key)
            size += self.elements[key]
            if size >= self.zero.prefetch_bucket_size:
                groups.append(self._fetch(ahead, groups))
                ahead, size = [], 0
        self._fetch(ahead, groups)

    def _fetch(self, keys: list[Key], others: Sequence[int] = ()) -> int:
        """Gather parameters as one group, while ``others`` (bytes of groups) are on their way; gives its bytes."""
        if not keys:
            return 0
        self.available += sum(self.elements[key] for key in keys)
        if self.world == 1 and not self.zero.offload_param:
            self.live.update(dict.fromkeys(keys, 0))
            return 0
        size = sum(self._part(self.elements[key]) * self.world * self._communicated(key) for key in keys)
        self.ledger.add("communication", size)
        if self.gloo and self.world > 1:
            # Two threads run collectives; one more lets go of its copy as the next begins.
            self.ledger.spike("communication", size + sum(others[-2:]))
        group = Gathered(set(keys), size)
        for key in keys:
            self.groups[key] = group
        return size

    def _wait(self, key: Key) -> None:
        group = self.groups.get(key)
        if group is None:
            return
        if not group.copied:
            group.copied = True
            for other in group.waiting:
                self.live[other] = self.width * self.elements[other]
                self.ledger.add("parameters", self.live[other])
        self.groups.pop(key, None)
        group.waiting.discard(key)
        if not group.waiting:
            self.ledger.add("communication", -group.buffer_bytes)

    def _release(self, layer: str) -> None:
        """Free what is not persistent and not used again soon."""
        candidates = [key for key in self.of[layer] if key in self.live and key not in self.persistent]
        if not candidates:
            return
        passed = 0
        soon: set[Key] = set()
        for name in self.uses[self.place :]:
            if passed >= self.zero.max_reuse_distance:
                break
            soon.update(self.of[name])
            passed += sum(self.elements[key] for key in self.of[name])
        for key in candidates:
            if key not in soon:
                self._free(key)

    def _free(self, key: Key) -> None:
        self.ledger.add("parameters", -self.live.pop(key))
        self.available -= self.elements[key]

    def on_gradient(self, layer: str, index: int, size: int) -> None:
        key = (layer, index)
        self.ledger.add("gradients", size)
        elements = self.elements[key]
        bucket = self.buckets[self._communicated(key)]
        if bucket.elements + elements > self.zero.reduce_bucket_size:
            self._reduce(bucket)
        bucket.keys.append(key)
        bucket.elements += elements
        if elements <= self.zero.reduce_bucket_size:
            self.ledger.add("gradients", -size)

    def after_layer(self, layer: str) -> None:
        self._release(layer)

    def _reduce(self, bucket: Bucket) -> None:
        """Put the bucket together rank by rank, reduce and scatter it."""
        keys = bucket.keys
        if not keys:
            return
        width = self._communicated(keys[0])
        flat = width * self.world * sum(self._part(self.elements[key]) for key in keys)
        cast = width * bucket.elements if width != self.width else 0
        one = len(keys) == 1 and bucket.elements % self.world == 0
        whole = cast + (0 if one else flat)
        copied = flat if self.gloo and self.world > 1 else 0
        parts = self.width * flat // (width * self.world) if cast else 0
        self.ledger.spike("communication", whole + max(copied, parts))
        for key in keys:
            if self.elements[key] > self.zero.reduce_bucket_size:
                self.ledger.add("gradients", -self.width * self.elements[key])
        keys.clear()
        bucket.elements = 0

    def after_backward(self, boundary: bool) -> None:
        for bucket in self.buckets.values():
            self._reduce(bucket)

    def step(self) -> None:
        self.ledger.begin("step", "optimizer")
        for key in list(self.live):
            self._free(key)
        if self._host:
            self._gather_persistent()
            return
        flat = self.partition
        self.ledger.add("temporary", self.width * flat)
        if self.width == 2:
            self.ledger.run("temporary", 4 * flat, 2 * flat)
        self.ledger.spike("temporary", optimizer_temporary(self.strategy, [flat]))
        self.ledger.add("temporary", -self.ledger.held("temporary"))
        self._gather_persistent()
