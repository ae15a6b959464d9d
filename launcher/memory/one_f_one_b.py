"""DeepSpeed's pipeline on the ledger: one rank a stage, one forward, one backward.

    stage 0    F0  .  F1  .  F2 B0 F3 B1  . B2  . B3         F forward, B backward of a micro-batch;
    stage 1     . F0   . F1 B0 F2 B1 F3 B2  . B3  .          three stages, four micro-batches
    stage 2     .  .  F0 B0 F1 B1 F2 B2 F3 B3  .  .

Up to ``stages - stage`` micro-batches are under way in a stage. From deepspeed/runtime/pipe/engine.py (0.19.8), of
what a stage holds for them:

    inputs           of the first stage: a copy of each micro-batch, until the next one that takes its place
                     (``_exec_load_micro_batch``); of the others: a copy of what was received, until its gradient is
                     sent (``_exec_recv_activations``, ``_exec_send_grads``)
    their clones     which go into the layers (``_exec_forward_pass``)
    outputs          until their backward (``_exec_backward_pass``). The last stage keeps its outputs until the next
                     micro-batch that takes their place, and through their graph also the inputs and their gradients
    buffers          one state that is received into and one state's gradients, for all of the run
                     (``pipe_recv_buf``, ``grad_layer``)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from launcher.memory.ledger import Ledger
from launcher.memory.pipeline_weights import stage_weights
from launcher.memory.prediction import DevicePrediction, Prediction
from launcher.memory.schedule import Held, Passage, run_loss
from launcher.memory.strategy import Strategy
from launcher.memory.table import LayerTable
from launcher.memory.tracing import Trace
from launcher.memory.weights import Parameters

Kind = Literal[
    "LoadMicroBatch",
    "RecvActivation",
    "ForwardPass",
    "SendActivation",
    "RecvGrad",
    "BackwardPass",
    "SendGrad",
    "ReduceGrads",
    "OptimizerStep",
]


class Instruction(NamedTuple):
    """One instruction, by the name of its class in DeepSpeed."""

    kind: Kind
    buffer: int = 0


def predict_one_f_one_b(strategy: Strategy, table: LayerTable) -> Prediction:
    """Give the memory of each stage, on the replica that needs most; devices are called after its first rank."""
    device = "rank" if strategy.device_type == "cpu" else "cuda"
    mark = " " if strategy.device_type == "cpu" else ":"
    stages = [_Stage(strategy, table, number).predict() for number in range(strategy.stages)]
    return Prediction(
        tuple(
            DevicePrediction(f"{device}{mark}{number * strategy.data_world}", timeline)
            for number, timeline in enumerate(stages)
        )
    )


def instructions(micro_batches: int, stages: int, stage: int) -> Iterator[Instruction]:
    """What one stage does in a step, in order: deepspeed/runtime/pipe/schedule.py, ``TrainSchedule``.

    Time steps are common to all stages: micro-batch m goes forward at ``stage + 2m`` and backward at
    ``2 · stages - 1 - stage + 2m``.
    """
    buffers = max(2, min(stages - stage, micro_batches))
    before = -1
    for time in range(2 * (micro_batches + stages - 1)):
        is_forward = (time - stage) % 2 == 0
        start = stage if is_forward else 2 * stages - 1 - stage
        now = (time - start) // 2
        here, there = 0 <= now < micro_batches, 0 <= before < micro_batches
        if is_forward:
            if there and stage > 0:
                yield Instruction("SendGrad", before % buffers)
            if here and stage > 0:
                yield Instruction("RecvActivation", now % buffers)
            if here and stage in (0, stages - 1):
                yield Instruction("LoadMicroBatch", now % buffers)
            if here:
                yield Instruction("ForwardPass", now % buffers)
        else:
            if here and stage < stages - 1:
                yield Instruction("RecvGrad", now % buffers)
            if there and stage < stages - 1:
                yield Instruction("SendActivation", before % buffers)
            if here:
                yield Instruction("BackwardPass", now % buffers)
        before = now
    yield Instruction("ReduceGrads")
    yield Instruction("OptimizerStep")


@dataclass
class _Slot:
    """One of a stage's places for a micro-batch (``pipe_buffers``)."""

    loaded: bool = False
    passage: Passage | None = None
    outputs: list[Held] = field(default_factory=list)
    """Of the last stage only; elsewhere the passage has them as its state."""
    leaves: int = 0
    """Bytes of inputs and their gradients that the graph of the last stage's outputs keeps."""


class _Stage:
    """One stage's ledger, and what each instruction does to it."""

    def __init__(self, strategy: Strategy, table: LayerTable, number: int) -> None:
        first, end = strategy.stage_bounds[number : number + 2]
        self.strategy, self.table, self.number = strategy, table, number
        self.names = strategy.layers[first:end]
        self.is_first, self.is_last = number == 0, number == strategy.stages - 1
        self.ledger = Ledger()
        self.weights = stage_weights(self.ledger, Parameters(table, self.names), strategy)
        self.elsewhere = Parameters(table, strategy.layers[:first] + strategy.layers[end:])
        bottom, top = self._trace(first), self._trace(end - 1)
        self.inputs = bottom.inputs
        self.sends = bottom.sends
        # Received tensors of floating dtype get a gradient, if need be of zeros; so do those that are sent.
        self.floating_in = () if self.is_first else self._trace(first - 1).floating
        self.floating_out = () if self.is_last else top.floating
        self.outputs = top.outputs
        self.receives = () if self.is_last else self._trace(end).sends
        self.slots: dict[int, _Slot] = {}
        self.leaves_of_loss = self.receive_buffer = self.gradient_buffer = 0

    def _trace(self, index: int) -> Trace:
        name = self.strategy.layers[index]
        return self.table.layers[name].trace(name in self.strategy.recompute)

    def predict(self) -> tuple:
        """Give the timeline of load, initialisation and a step that is like all later ones."""
        strategy, ledger = self.strategy, self.ledger
        micro_batches = strategy.chunks * strategy.accumulation_steps
        self.weights.load()
        if strategy.device_type == "cpu":
            # PipelineModule keeps all layers that it was given (_layer_specs); those of other stages stay in fp32.
            ledger.add("parameters", 4 * self.elsewhere.elements)
        self.weights.initialise()
        ledger.begin("forward", "inputs")
        # The loop holds a step's micro-batches on every stage.
        ledger.add("inputs", micro_batches * (sum(self.table.input_bytes) + self.table.target_bytes))
        start = len(ledger.timeline())
        # More micro-batches take the places of earlier ones: beyond two rounds nothing is new.
        few = min(micro_batches, strategy.stages + 2)
        for _ in range(2):
            steady = len(ledger.timeline())
            for kind, number in instructions(few, strategy.stages, self.number):
                self._do(kind, self.slots.setdefault(number, _Slot()))
        timeline = ledger.timeline()
        return timeline[:start] + timeline[steady:]

    def _do(self, kind: Kind, slot: _Slot) -> None:
        if kind == "LoadMicroBatch":
            self._load(slot)
        elif kind == "RecvActivation":
            self._receive(slot)
        elif kind == "ForwardPass":
            self._forward(slot)
        elif kind == "RecvGrad":
            self._receive_gradient()
        elif kind == "BackwardPass":
            self._backward(slot)
        elif kind == "SendGrad":
            self._send_gradient(slot)
        elif kind == "ReduceGrads":
            self.weights.after_backward(boundary=True)
        elif kind == "OptimizerStep":
            self.weights.step()

    def _load(self, slot: _Slot) -> None:
        if not self.is_first:  # labels: views of what the loop holds
            return
        size = sum(self.inputs)
        self.ledger.begin("forward", "load")
        self.ledger.add("inputs", size)
        if slot.loaded:
            self.ledger.add("inputs", -size)
        slot.loaded = True

    def _receive(self, slot: _Slot) -> None:
        self.ledger.begin("forward", "receive")
        size = sum(self.inputs)
        if not self.receive_buffer:
            self.receive_buffer = size
            self.ledger.add("communication", size)
        self.ledger.add("activations", size)

    def _forward(self, slot: _Slot) -> None:
        passage = Passage(self.ledger, self.table.layers, self.strategy.recompute)
        passage.enter(self.inputs, owned=True)
        clones = passage.state
        for held in clones:  # by the frame of _exec_forward_pass
            held.holders += 1
        passage.forward(self.names)
        slot.passage = passage
        if self.is_last:
            for held in passage.state:
                held.holders += 1
            for held in slot.outputs:
                passage.let_go(held)
            slot.outputs = passage.state
            self._forget(slot)
            run_loss(self.ledger, self.table.loss, passage)
        for held in clones:
            passage.let_go(held)

    def _forget(self, slot: _Slot) -> None:
        """The graph of the outputs before goes when these have taken their place."""
        self.ledger.add("activations", -slot.leaves)
        slot.leaves = 0

    def _receive_gradient(self) -> None:
        self.ledger.begin("backward", "receive")
        if not self.gradient_buffer:
            self.gradient_buffer = _chosen(self.outputs, self.floating_out)
            self.ledger.add("communication", self.gradient_buffer)

    def _backward(self, slot: _Slot) -> None:
        passage = slot.passage
        assert passage is not None
        if not self.is_last:
            # Only tensors of floating dtype are kept from here on (launcher/engines/deepspeed_pipe.py, _Joined).
            floating = [held for held, flag in zip(passage.state, self.floating_out, strict=True) if flag]
            for held, flag in zip(passage.state, self.floating_out, strict=True):
                if not flag:
                    passage.let_go(held)
            passage.state = floating
            # The trace frees the gradients from above, but their buffer stays.
            self.ledger.add("activations", _chosen(self.outputs, self.receives))
        passage.backward(self.weights.on_gradient)
        passage.leave()
        slot.passage = None

    def _send_gradient(self, slot: _Slot) -> None:
        """Free what was received, its gradients, and zeros in place of missing ones."""
        self.ledger.begin("backward", "send")
        gradients = _chosen(self.inputs, self.sends)
        zeros = _chosen(self.inputs, self.floating_in) - gradients
        self.ledger.add("activations", zeros)
        kept = 0
        if self.is_last:
            kept = slot.leaves = 2 * gradients
        self.ledger.add("activations", -(sum(self.inputs) + gradients + zeros - kept))


def _chosen(sizes: tuple[int, ...], flags: tuple[bool, ...]) -> int:
    return sum(size for size, flag in zip(sizes, flags, strict=True) if flag)
