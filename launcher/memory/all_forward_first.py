"""FairScale's ``Pipe`` on the ledger: every chunk goes forward through all stages before the first goes back.

    stage 0    F0 F1 F2 F3  .                      . B3 B2 B1 B0      F forward, B backward of a chunk
    stage 1     . F0 F1 F2 F3  loss on the  B3 B2 B1 B0  .
                               whole batch

So every stage keeps the activations of all chunks at once. From fairscale/nn/pipe (0.4.13): the chunks are views of
the batch (``microbatch.scatter``); a stage on another device copies what it takes over (``copy.Copy``), one on the
same device does not; ``microbatch.gather`` puts the outputs together once more. Weights are fp32 under every
precision, for the engine trains under autocast.

On the CPU ``worker.create_workers`` makes one thread for all stages (it drops the device's index), so nothing overlaps,
and autograd runs in the calling thread, newest node first. Until its next task the thread keeps what the last task
took and gave (the variables of ``worker.worker``), and the engine the gathered outputs: both outlive the step.
``pipeline.depend`` orders the chunks by their slot 0 alone, and behind the last stage there is no ``Wait`` that binds
the other slots to it. So their share of the backward pass runs for all chunks first:

    losses ─► ITC features, chunk 3 2 1 0 ─► MLM logits, chunk 3 2 1 0 ─► B3 of the last stage …
"""

from dataclasses import replace
from itertools import pairwise

from launcher.memory.ledger import Ledger
from launcher.memory.prediction import DevicePrediction, Prediction
from launcher.memory.schedule import Held, Passage, Step, run_loss
from launcher.memory.strategy import Strategy
from launcher.memory.table import LayerTable, layer_table
from launcher.memory.weights import (
    OPTIMIZER_STATES,
    AlwaysThere,
    Key,
    Parameters,
    build_model,
    optimizer_temporary,
)

Kept = list[tuple[Passage, list[Held]]]
"""What outlives a micro-batch, with the passage whose ledger counts it."""


def computed(strategy: Strategy) -> Strategy:
    """The strategy with the precision in which the engine really computes."""
    if strategy.precision == "fp16":
        return replace(strategy, precision="autocast-fp16")
    return replace(strategy, precision="autocast-bf16") if strategy.precision == "bf16" else strategy


def predict_all_forward_first(strategy: Strategy, table: LayerTable) -> Prediction:
    """Give the memory of each stage's device; on the CPU all stages share one process, and so one ledger."""
    strategy = computed(strategy)
    # torch.chunk makes chunks of equal size, and fewer than asked for where they do not come out even.
    strategy = replace(strategy, chunks=-(-strategy.micro_batch_size // strategy.rows))
    tables = _tables(strategy, table)
    share = _largest_share(Parameters(table, strategy.layers), strategy)
    stages = [strategy.layers[first:end] for first, end in pairwise(strategy.stage_bounds)]
    shared = strategy.device_type == "cpu"
    ledgers = [Ledger()] if shared else [Ledger() for _ in stages]
    groups = [strategy.layers] if shared else stages
    weights = [
        PipeWeights(ledger, Parameters(table, names), strategy, share)
        for ledger, names in zip(ledgers, groups, strict=True)
    ]
    for one in weights:
        one.load()
        one.initialise()
    for ledger in ledgers:
        ledger.begin("forward", "inputs")
    inputs = sum(table.input_bytes) * strategy.micro_batch_size // table.rows_per_pass
    ledgers[0].add("inputs", strategy.accumulation_steps * (inputs + table.target_bytes))
    kept: Kept = []
    for number in range(count := min(2, strategy.accumulation_steps)):
        kept = _micro_batch(strategy, tables, stages, ledgers, weights, kept)
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


def _tables(strategy: Strategy, table: LayerTable) -> list[LayerTable]:
    """The layer table of each chunk; the last chunk has the rows that are left."""
    rows = strategy.micro_batch_size - (strategy.chunks - 1) * table.rows_per_pass
    if rows == table.rows_per_pass:
        return [table] * strategy.chunks
    rest = layer_table(
        strategy.spec,
        precision=strategy.precision,
        rows=rows,
        text_length=strategy.length,
        device_type=strategy.device_type,
        ranks=strategy.data_world,
        whole_rows=strategy.micro_batch_size,
    )
    return [table] * (strategy.chunks - 1) + [rest]


def _micro_batch(
    strategy: Strategy,
    tables: list[LayerTable],
    stages: list[list[str]],
    ledgers: list[Ledger],
    weights: list["PipeWeights"],
    kept: Kept,
) -> Kept:
    """One micro-batch; ``kept`` is what the one before left behind. Gives what this one leaves."""
    chunks, last = strategy.chunks, len(stages) - 1
    passages = [
        [
            Passage(ledgers[min(stage, len(ledgers) - 1)], table.layers, strategy.recompute)
            for stage in range(last + 1)
        ]
        for table in tables
    ]
    left: Kept = []
    for clock in range(chunks + last):
        for stage in range(last + 1):
            if not 0 <= clock - stage < chunks:
                continue
            passage, before = passages[clock - stage][stage], passages[clock - stage][stage - 1]
            if not stage:
                passage.enter(tables[clock - stage].input_bytes, owned=False)
            elif len(ledgers) == 1:
                passage.state, before.state = before.state, []
            else:
                passage.enter([held.size for held in before.state], owned=True)
                before.leave()
            if clock - stage == chunks - 1 and (stage == last or len(ledgers) > 1):
                left.append(_keep(passage))  # the last task of this worker: what it took …
            passage.forward(stages[stage])
    left.append(_keep(passages[-1][last]))  # … and gave
    end = ledgers[-1]
    end.begin("loss", "gather")
    whole = Passage(end, tables[0].layers, strategy.recompute)
    whole.enter(tables[0].loss.trace(recompute=False).inputs, owned=True)
    left.append(_keep(whole))
    for row in passages:
        row[last].leave()
    for passage, state in kept:
        for held in state:
            passage.let_go(held)
    run_loss(end, tables[0].loss, whole)
    features = [_FeatureGradients(table, stages[-1], end) for table in tables]
    _first_slots(features, [row[last] for row in passages], weights[-1])
    for clock in range(chunks + last):
        for stage in range(last, -1, -1):
            chunk = chunks - 1 - (clock - (last - stage))
            if 0 <= chunk < chunks:
                passages[chunk][stage].backward(
                    weights[min(stage, len(weights) - 1)].on_gradient,
                    features[chunk].take_over if stage == last else None,
                )
    return left


def _keep(passage: Passage) -> tuple[Passage, list[Held]]:
    for held in passage.state:
        held.holders += 1
    return passage, list(passage.state)


class _FeatureGradients:
    """The gradients that the ITC features send into both towers' outputs before anything else runs.

    The features take single tokens or means, so their backward makes tensors of the full size of the towers'
    outputs, for all chunks first where ``fusion.embed`` is in the last stage. They wait there for the rest.
    """

    def __init__(self, table: LayerTable, names: list[str], ledger: Ledger) -> None:
        self.ledger, self.size = ledger, 0
        if "fusion.embed" in names and table.spec.objectives.itc is not None:
            self.size = sum(table.layers["fusion.embed"].trace(recompute=False).inputs[:2])

    def make(self) -> None:
        """Those of one chunk."""
        self.ledger.add("activations", self.size)

    def take_over(self, layer: str) -> None:
        """The trace of ``fusion.embed`` makes them itself."""
        if layer == "fusion.embed":
            self.ledger.add("activations", -self.size)


def _first_slots(features: list[_FeatureGradients], passages: list[Passage], weights: "PipeWeights") -> None:
    """What runs for all chunks first; of the head all of it, for ITM's logits are two columns wide."""
    ledger = passages[0].ledger
    ledger.begin("backward", "fusion.embed")
    for one in features:
        one.make()
    gathered = 0
    for number, passage in enumerate(reversed(passages)):
        below: list[Step] = passage.steps[:-1]
        text = passage.steps[-1].outputs[1].size
        passage.steps = passage.steps[-1:]
        if number == len(passages) - 1:
            ledger.add("activations", -gathered)
        passage.backward(weights.on_gradient)
        if number < len(passages) - 1:
            # The trace frees the gradient of its chunk's logits, which is a view of the whole batch's.
            gathered += text
            ledger.add("activations", text)
        passage.steps = below


def _largest_share(parameters: Parameters, strategy: Strategy) -> set[Key]:
    """What the rank updates that updates most.

    OSS gives each parameter to the rank that has least (fairscale/optim/oss.py, ``partition_parameters``).
    """
    ranks = strategy.data_world if strategy.zero.stage else 1
    sizes, shares = [0] * ranks, [set[Key]() for _ in range(ranks)]
    for key, elements in zip(parameters.trained_keys, parameters.trained, strict=True):
        rank = sizes.index(min(sizes))
        shares[rank].add(key)
        sizes[rank] += elements
    return shares[sizes.index(max(sizes))]


class PipeWeights(AlwaysThere):
    """fp32 weights of some stages; see ``launcher.memory.weights.Weights``.

    Several processes: DistributedDataParallel keeps buckets as large as the gradients (torch, ``reducer.cpp``), and
    with ZeRO 1 FairScale's ``OSS`` keeps each rank's share of the optimizer state.
    """

    def __init__(self, ledger: Ledger, parameters: Parameters, strategy: Strategy, share: set[Key]) -> None:
        self.ledger, self.parameters, self.strategy = ledger, parameters, strategy
        self.own = [
            elements
            for key, elements in zip(parameters.trained_keys, parameters.trained, strict=True)
            if key in share
        ]
        # A linear weight's gradient is a transposed view, which autograd cannot add to in place. Under autocast, the
        # cast back to fp32 makes a tensor of its own.
        self.views = parameters.linear_weights if strategy.precision == "fp32" else frozenset()
        self.states = OPTIMIZER_STATES.get(strategy.optimizer, 2)
        self.gradients: set[Key] = set()
        self.summed: dict[Key, int] = {}

    def load(self) -> None:
        build_model(self.ledger, self.parameters, width=4)

    def initialise(self) -> None:
        trained = self.parameters.trained_elements
        self.ledger.begin("initialise", "optimizer")
        if self.strategy.data_world > 1:
            self.ledger.add("communication", 4 * trained)
        self.ledger.add("optimizer state", 4 * self.states * sum(self.own))

    def on_gradient(self, layer: str, index: int, size: int) -> None:
        """The chunks are one graph: autograd sums a parameter's gradients up before any of them reaches ``.grad``."""
        key = (layer, index)
        self.summed[key] = self.summed.get(key, 0) + 1
        if self.summed[key] == 1:
            self.ledger.add("gradients", size)
        elif key in self.views:
            self.ledger.spike("gradients", 2 * size)  # this chunk's, and the sum (torch's input_buffer.cpp)
        if self.summed[key] == self.strategy.chunks:
            del self.summed[key]
            if key in self.gradients:  # added to what earlier micro-batches left
                self.ledger.add("gradients", -size)
            self.gradients.add(key)

    def after_backward(self, boundary: bool) -> None:
        pass

    def step(self) -> None:
        self.ledger.begin("step", "optimizer")
        self.ledger.spike("temporary", optimizer_temporary(self.strategy, self.own))
        self.ledger.add("gradients", -self.ledger.held("gradients"))
        self.gradients.clear()
