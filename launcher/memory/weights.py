"""What an engine holds beside activations: weights, gradients, optimizer state, buckets.

``Weights`` is what the simulator asks of each engine; one class per way of holding them. Each says in its
docstring from which lines of which library its numbers come.
"""

from typing import Protocol

from launcher.memory.ledger import Ledger
from launcher.memory.strategy import Strategy
from launcher.memory.table import LayerTable

Key = tuple[str, int]
"""A parameter: layer and index."""

OPTIMIZER_STATES = {
    "Adadelta": 2,
    "Adagrad": 1,
    "Adam": 2,
    "AdamW": 2,
    "Adamax": 2,
    "Lamb": 2,
    "Lion": 1,
    "NAdam": 2,
    "RAdam": 2,
    "RMSprop": 1,
    "SGD": 1,
}
"""Tensors of a parameter's size that an optimizer keeps (SGD: with momentum)."""


LOWERED_BY_AUTOCAST = {"Linear", "Conv1d", "Conv2d", "Conv3d"}
"""Modules that deepspeed/runtime/torch_autocast.py (0.19.8) takes for safe in 16 bits."""


class Weights(Protocol):
    """The weights of one rank under one engine. Called in the order of a run."""

    def load(self) -> None:
        """Build the model."""

    def initialise(self) -> None:
        """Build engine and optimizer, up to a steady state."""

    def before_micro_batch(self) -> None:
        """A micro-batch begins."""

    def before_forward(self, layer: str) -> None:
        """A layer is about to run forward."""

    def after_forward(self, layer: str) -> None:
        """It has."""

    def before_backward(self, layer: str) -> None:
        """A layer is about to run backward."""

    def after_layer(self, layer: str) -> None:
        """Its backward is over."""

    def on_gradient(self, layer: str, index: int, size: int) -> None:
        """A gradient is finished."""

    def after_backward(self, boundary: bool) -> None:
        """The backward pass of a micro-batch is over; ``boundary``: an optimizer step follows."""

    def step(self) -> None:
        """The optimizer's step, and what frees the gradients."""


class AlwaysThere:
    """What of ``Weights`` does nothing where all parameters stay on the device."""

    def before_micro_batch(self) -> None:
        pass

    def before_forward(self, layer: str) -> None:
        pass

    def after_forward(self, layer: str) -> None:
        pass

    def before_backward(self, layer: str) -> None:
        pass

    def after_layer(self, layer: str) -> None:
        pass


class Parameters:
    """The parameters of some layers in order: elements, and which are trained."""

    def __init__(self, table: LayerTable, names: list[str]) -> None:
        self.of: dict[str, list[tuple[int, bool]]] = {}
        self.all: list[tuple[str, int, int, bool]] = []
        for name in names:
            row = table.layers[name]
            flags = row.plain.trainable if row.plain else (row.trainable,) * len(row.parameters)
            self.of[name] = list(zip(row.parameters, flags, strict=True))
            for index, (elements, trained) in enumerate(self.of[name]):
                self.all.append((name, index, elements, trained))
        owners = {(name, i): owner for name in names for i, owner in enumerate(table.layers[name].owners)}
        self.linear_weights = frozenset(key for key, owner in owners.items() if owner == "Linear.weight")
        self.lowered = {
            key for key, owner in owners.items() if owner.partition(".")[0] in LOWERED_BY_AUTOCAST
        }
        """What DeepSpeed's torch_autocast gathers and reduces in 16 bits."""
        self.elements = sum(elements for _, _, elements, _ in self.all)
        self.largest_of_all = max((elements for _, _, elements, _ in self.all), default=0)
        self.trained = [elements for _, _, elements, flag in self.all if flag]
        self.trained_keys = [(name, index) for name, index, _, flag in self.all if flag]
        self.trained_elements = sum(self.trained)
        self.largest = max(self.trained, default=0)


def element_bytes(strategy: Strategy) -> int:
    """Bytes of one element of the model's parameters during the run."""
    return 2 if strategy.precision in ("fp16", "bf16") else 4


def build_model(ledger: Ledger, parameters: Parameters, width: int) -> None:
    """The model is built in fp32; ``width`` 2: and cast to 16 bits, one parameter after the other."""
    ledger.begin("load", "model")
    ledger.add("parameters", 4 * parameters.elements)
    if width == 2:
        ledger.run("parameters", 2 * parameters.largest_of_all, -2 * parameters.elements)


def optimizer_temporary(strategy: Strategy, sizes: list[int]) -> int:
    """Bytes that torch's or DeepSpeed's optimizer needs for a moment to update fp32 tensors of these sizes.

    torch.optim.adamw._single_tensor_adamw (the CPU's): the square root of the second moment and its quotient, for
    one tensor at a time; ``_multi_tensor_adamw`` (foreach, CUDA's): the square roots of all. Fused: nothing.
    """
    if strategy.device_type == "cpu":
        return 2 * 4 * max(sizes, default=0)
    return 0 if strategy.fused_optimizer else 4 * sum(sizes)


def buckets(sizes: list[int], limit: int) -> list[int]:
    """Sizes of DeepSpeed's flat buckets: filled until the first tensor that goes beyond ``limit`` elements."""
    found, now = [], 0
    for size in sizes:
        now += size
        if now > limit:
            found.append(now)
            now = 0
    return [*found, now] if now else found


class WholeWeights(AlwaysThere):
    """ZeRO stage 0: every rank holds everything (deepspeed/runtime/engine.py and fp16/unfused_optimizer.py).

    fp32 and autocast: parameters, gradients and optimizer state in fp32. 16 bits: parameters and gradients in 16,
    masters and optimizer state in 32, and for the step all gradients once more in 32.
    """

    bucket_elements = 500_000_000
    """MEMORY_OPT_ALLREDUCE_SIZE: gradients are flattened for the all-reduce, also on one rank."""

    def __init__(self, ledger: Ledger, parameters: Parameters, strategy: Strategy) -> None:
        self.ledger, self.parameters, self.strategy = ledger, parameters, strategy
        self.width = element_bytes(strategy)
        self.states = OPTIMIZER_STATES.get(strategy.optimizer, 2)
        self.gradients: set[Key] = set()

    def load(self) -> None:
        build_model(self.ledger, self.parameters, self.width)

    def initialise(self) -> None:
        trained = self.parameters.trained_elements
        self.ledger.begin("initialise", "optimizer")
        if self.width == 2:
            self.ledger.add("master weights", 4 * trained)
            self.ledger.add("gradients", (2 + 4) * trained)
        self.ledger.add("optimizer state", 4 * self.states * trained)
        if self.width == 2:
            self.ledger.spike("temporary", optimizer_temporary(self.strategy, self.parameters.trained))
            self.ledger.add("gradients", -(2 + 4) * trained)

    def on_gradient(self, layer: str, index: int, size: int) -> None:
        if (layer, index) not in self.gradients:
            self.gradients.add((layer, index))
            self.ledger.add("gradients", size)
        # else: added to the one that is there, and freed

    def after_backward(self, boundary: bool) -> None:
        if not boundary:
            return
        self.ledger.begin("step", "all-reduce")
        missing = self.width * self.parameters.trained_elements - self.ledger.held("gradients")
        self.ledger.add("gradients", missing)  # zeros for what got no gradient
        largest = max(buckets(self.parameters.trained, self.bucket_elements), default=0)
        self.ledger.spike("communication", self.width * largest)

    def step(self) -> None:
        self.ledger.begin("step", "optimizer")
        if self.width == 2:
            self.ledger.add("gradients", 4 * self.parameters.trained_elements)
        self.ledger.spike("temporary", optimizer_temporary(self.strategy, self.parameters.trained))
        self.ledger.add("gradients", -self.ledger.held("gradients"))
        self.gradients.clear()
