"""One micro-batch through a stretch of layers: who holds which tensor until when.

A tensor that one layer hands to the next is freed when the last of its holders lets go: the loop that carries
the state, the graph of the layer that made it, the graphs of the layers that took it.

    forward    state ─ layer 0 ─ state ─ layer 1 ─ state …     each graph keeps what its trace says
    backward   … layer 1 ─ layer 0                             … and drops it at the place its trace says
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.memory.ledger import Ledger
from launcher.memory.table import LayerRow
from launcher.memory.tracing import Trace

OnLayer = Callable[[str], None]
"""Called with the name of a layer that is about to run, or has."""

OnGradient = Callable[[str, int, int], None]
"""Called with (layer, index of the parameter, bytes) when a gradient is finished."""


class Held:
    """A tensor at a boundary: its bytes and how many still hold it."""

    __slots__ = ("holders", "size")

    def __init__(self, size: int) -> None:
        self.size, self.holders = size, 1


@dataclass
class Step:
    """A layer that has run forward, and what its graph holds."""

    name: str
    trace: Trace
    recompute: bool
    inputs: list[Held]
    outputs: list[Held]


class Passage:
    """One micro-batch on its way through ``layers``; ``forward`` once, then ``backward`` once."""

    def __init__(self, ledger: Ledger, rows: dict[str, LayerRow], recompute: frozenset[str]) -> None:
        self.ledger, self.rows, self.recompute = ledger, rows, recompute
        self.steps: list[Step] = []
        self.state: list[Held] = []

    def enter(self, sizes: Sequence[int], owned: bool) -> None:
        """Take the state in; ``owned`` tensors are allocated here, others belong to the caller all along."""
        self.state = [Held(size) for size in sizes]
        for held in self.state:
            if owned:
                self.ledger.add("activations", held.size)
            else:
                held.holders += 1

    def forward(
        self,
        names: Sequence[str],
        phase: str = "forward",
        graph: bool = True,
        before: OnLayer | None = None,
        after: OnLayer | None = None,
    ) -> None:
        """Run layers; without ``graph`` (evaluation) nothing is kept."""
        cached = 0
        for name in names:
            self.ledger.begin(phase, name)
            if before is not None:
                before(name)
            recompute = name in self.recompute
            trace = self.rows[name].trace(recompute)
            for _, peak, net in trace.forward:
                self.ledger.run("activations", peak, net)
            cached += trace.cached_bytes
            made = {}
            outputs = []
            for slot, (size, origin) in enumerate(zip(trace.outputs, trace.passes, strict=True)):
                if origin < 0:
                    made[slot] = Held(size)
                    outputs.append(made[slot])
                else:
                    self.state[origin].holders += 1
                    outputs.append(self.state[origin])
            step = Step(name, trace, recompute, self.state, outputs)
            if graph:
                for slot, kept in enumerate(trace.keeps_in):
                    self.state[slot].holders += kept
                for slot, kept in enumerate(trace.keeps_out):
                    outputs[slot].holders += kept
                self.steps.append(step)
            else:
                self.ledger.add("activations", -trace.kept_bytes + trace.cached_bytes)
            for held in self.state:
                self.let_go(held)
            self.state = outputs
            if after is not None:
                after(name)
        if cached:
            self.ledger.add("activations", -cached)

    def leave(self) -> None:
        """Let go of the state at the end: only graphs hold it from here on."""
        for held in self.state:
            self.let_go(held)
        self.state = []

    def backward(
        self, on_gradient: OnGradient, before: OnLayer | None = None, after: OnLayer | None = None
    ) -> None:
        """Run the layers of ``forward`` backward."""
        while self.steps:
            step = self.steps.pop()
            self.ledger.begin("backward", step.name)
            if before is not None:
                before(step.name)
            dropped: set[tuple[str, int]] = set()
            category = "recompute" if step.recompute else "activations"
            for kind, a, b in step.trace.backward:
                if kind == "run":
                    self.ledger.run(category, a, b)
                elif kind == "gradient":
                    on_gradient(step.name, a, b)
                elif kind == "drop in":
                    if step.trace.keeps_in[a]:
                        dropped.add((kind, a))
                        self.let_go(step.inputs[a])
                elif step.trace.keeps_out[a]:
                    dropped.add((kind, a))
                    self.let_go(step.outputs[a])
            for slot, kept in enumerate(step.trace.keeps_in):
                if kept and ("drop in", slot) not in dropped:
                    self.let_go(step.inputs[slot])
            for slot, kept in enumerate(step.trace.keeps_out):
                if kept and ("drop out", slot) not in dropped:
                    self.let_go(step.outputs[slot])
            if step.recompute:
                # What is left of a recomputed layer is what any layer leaves: gradients of its inputs.
                left = self.ledger.held("recompute")
                self.ledger.move("recompute", "activations", left)
            if after is not None:
                after(step.name)

    def let_go(self, held: Held) -> None:
        """One holder less; the last one frees it."""
        held.holders -= 1
        if not held.holders:
            self.ledger.add("activations", -held.size)


def run_loss(ledger: Ledger, loss: LayerRow, passage: Passage) -> None:
    """Forward and backward of the losses; leaves the gradients of the head's outputs."""
    trace = loss.trace(recompute=False)
    ledger.begin("loss", "losses")
    for _, peak, net in trace.forward:
        ledger.run("loss", peak, net)
    holds = [held for held, kept in zip(passage.state, trace.keeps_in, strict=True) if kept]
    for held in holds:
        held.holders += 1
    passage.leave()
    for kind, peak, net in trace.backward:
        if kind == "run":
            ledger.run("loss", peak, net)
    for held in holds:
        passage.let_go(held)
    ledger.move("loss", "activations", ledger.held("loss"))
