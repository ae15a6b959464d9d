"""FairScale's ``Pipe`` on the ledger: every chunk goes forward through all stages before the first goes back.

    stage 0    F0 F1 F2 F3  .                      . B3 B2 B1 B0      F forward, B backward of a chunk
    stage 1     . F0 F1 F2 F3  loss on the  B3 B2 B1 B0  .
                               whole batch

So every stage keeps the activations of all chunks at once. From fairscale/nn/pipe (0.4.13): the chunks are views of
the batch (``microbatch.scatter``); a stage on another device copies what it takes over (``copy.Copy``), one on the
same device does not; ``microbatch.gather`` puts the outputs together once more. Weights are fp32 under every
precision, for the engine trains under autocast.
"""

from dataclasses import replace
from itertools import pairwise

from launcher.memory.ledger import Ledger
from launcher.memory.prediction import DevicePrediction, Prediction
from launcher.memory.schedule import Held, Passage, run_loss
from launcher.memory.strategy import Strategy
from launcher.memory.table import LayerTable
from launcher.memory.weights import OPTIMIZER_STATES, AlwaysThere, Parameters, optimizer_temporary


def computed(strategy: Strategy) -> Strategy:
    """The strategy with the precision in which the engine really computes."""
    if strategy.precision == "fp16":
        return replace(strategy, precision="autocast-fp16")
    return replace(strategy, precision="autocast-bf16") if strategy.precision == "bf16" else strategy


def predict_all_forward_first(strategy: Strategy, table: LayerTable) -> Prediction:
    """Give the memory of each stage's device; on the CPU all stages share one process, and so one ledger."""
    strategy = computed(strategy)
    stages = [strategy.layers[first:end] for first, end in pairwise(strategy.stage_bounds)]
    shared = strategy.device_type == "cpu"
    ledgers = [Ledger()] if shared else [Ledger() for _ in stages]
    groups = [strategy.layers] if shared else stages
    weights = [
        PipeWeights(ledger, Parameters(table, names), strategy)
        for ledger, names in zip(ledgers, groups, strict=True)
    ]
    for one in weights:
        one.load()
        one.initialise()
    for ledger in ledgers:
        ledger.begin("forward", "inputs")
    chunks = strategy.chunks
    size = strategy.accumulation_steps * (chunks * sum(table.input_bytes) + table.target_bytes)
    ledgers[0].add("inputs", size)
    for number in range(count := min(2, strategy.accumulation_steps)):
        _micro_batch(strategy, table, stages, ledgers, weights)
        for one in weights:
            one.after_backward(boundary=number == count - 1)
    for one in weights:
        one.step()
    return Prediction(
        tuple(
            DevicePrediction("cpu" if shared else f"cuda:{number}", ledger.timeline())
            for number, ledger in enumerate(ledgers)
        )
    )


def _micro_batch(
    strategy: Strategy,
    table: LayerTable,
    stages: list[list[str]],
    ledgers: list[Ledger],
    weights: list["PipeWeights"],
) -> None:
    chunks, last = strategy.chunks, len(stages) - 1
    passages = [
        [
            Passage(ledgers[min(stage, len(ledgers) - 1)], table.layers, strategy.recompute)
            for stage in range(last + 1)
        ]
        for _ in range(chunks)
    ]
    for clock in range(chunks + last):
        for stage in range(last + 1):
            if not 0 <= clock - stage < chunks:
                continue
            passage, before = passages[clock - stage][stage], passages[clock - stage][stage - 1]
            if not stage:
                passage.enter(table.input_bytes, owned=False)
            elif len(ledgers) == 1:
                passage.state, before.state = before.state, []
            else:
                passage.enter([held.size for held in before.state], owned=True)
                before.leave()
            passage.forward(stages[stage])
    end = ledgers[-1]
    end.begin("loss", "gather")
    whole = Passage(end, table.layers, strategy.recompute)
    whole.state = [Held(chunks * held.size) for held in passages[0][last].state]
    for held in whole.state:
        end.add("activations", held.size)
    for row in passages:
        row[last].leave()
    run_loss(end, table.loss, whole)
    for clock in range(chunks + last):
        for stage in range(last, -1, -1):
            chunk = chunks - 1 - (clock - (last - stage))
            if 0 <= chunk < chunks:
                passages[chunk][stage].backward(weights[min(stage, len(weights) - 1)].on_gradient)


class PipeWeights(AlwaysThere):
    """fp32 weights of some stages; see ``launcher.memory.weights.Weights``.

    Several processes: DistributedDataParallel keeps buckets as large as the gradients (torch, ``reducer.cpp``), and
    with ZeRO 1 FairScale's ``OSS`` keeps each rank's share of the optimizer state.
    """

    def __init__(self, ledger: Ledger, parameters: Parameters, strategy: Strategy) -> None:
        self.ledger, self.parameters, self.strategy = ledger, parameters, strategy
        self.states = OPTIMIZER_STATES.get(strategy.optimizer, 2)
        self.gradients: set[tuple[str, int]] = set()
        self.summed: dict[tuple[str, int], int] = {}

    def load(self) -> None:
        self.ledger.begin("load", "model")
        self.ledger.add("parameters", 4 * self.parameters.elements)

    def initialise(self) -> None:
        trained = self.parameters.trained_elements
        self.ledger.begin("initialise", "optimizer")
        if self.strategy.data_world > 1:
            self.ledger.add("communication", 4 * trained)
        share = self.strategy.data_world if self.strategy.zero.stage else 1
        self.ledger.add("optimizer state", 4 * self.states * -(-trained // share))

    def on_gradient(self, layer: str, index: int, size: int) -> None:
        """The chunks are one graph: autograd sums a parameter's gradients up before any of them reaches ``.grad``."""
        key = (layer, index)
        self.summed[key] = self.summed.get(key, 0) + 1
        if self.summed[key] == 1:
            self.ledger.add("gradients", size)
        if self.summed[key] == self.strategy.chunks:
            del self.summed[key]
            if key in self.gradients:  # added to what earlier micro-batches left
                self.ledger.add("gradients", -size)
            self.gradients.add(key)

    def after_backward(self, boundary: bool) -> None:
        pass

    def step(self) -> None:
        self.ledger.begin("step", "optimizer")
        self.ledger.spike("temporary", optimizer_temporary(self.strategy, self.parameters.trained))
        self.ledger.add("gradients", -self.ledger.held("gradients"))
        self.gradients.clear()
