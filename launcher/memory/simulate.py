"""The schedule simulator: from a strategy and its layer table to a timeline of allocated bytes per device."""

from launcher.memory.all_forward_first import computed, predict_all_forward_first
from launcher.memory.flat_weights import FlatWeights
from launcher.memory.ledger import Ledger
from launcher.memory.one_f_one_b import predict_one_f_one_b
from launcher.memory.prediction import DevicePrediction, Prediction
from launcher.memory.schedule import Passage, run_loss
from launcher.memory.sharded_weights import ShardedWeights
from launcher.memory.strategy import Strategy
from launcher.memory.table import LayerTable, layer_table
from launcher.memory.weights import Parameters, Weights, WholeWeights


def predict(strategy: Strategy, table: LayerTable | None = None) -> Prediction:
    """Give the memory of a strategy; the table is traced (or read from the cache) where none is given."""
    table = table or table_of(strategy)
    if strategy.engine == "fairscale":
        return predict_all_forward_first(strategy, table)
    if strategy.engine == "deepspeed":
        return predict_one_f_one_b(strategy, table)
    return Prediction((_one_rank(strategy, table),))


def table_of(strategy: Strategy) -> LayerTable:
    """The layer table that a strategy needs."""
    if strategy.engine == "fairscale":
        strategy = computed(strategy)
    return layer_table(
        strategy.spec,
        precision=strategy.precision,
        rows=strategy.rows,
        text_length=strategy.length,
        device_type=strategy.device_type,
        around=strategy.engine != "fairscale",
        zero_3=strategy.zero.stage == 3,
        ranks=strategy.data_world,
        whole_rows=strategy.micro_batch_size if strategy.engine == "fairscale" else strategy.rows,
    )


def _one_rank(strategy: Strategy, table: LayerTable) -> DevicePrediction:
    """ZeRO: every rank holds all layers and runs its micro-batches one after the other."""
    ledger = Ledger()
    names = strategy.layers
    weights = _weights(ledger, Parameters(table, names), strategy)
    weights.load()
    weights.initialise()
    ledger.begin("forward", "inputs")
    ledger.add("inputs", strategy.accumulation_steps * (sum(table.input_bytes) + table.target_bytes))
    # From the second micro-batch on gradients are there already; a third is like the second.
    for number in range(count := min(2, strategy.accumulation_steps)):
        passage = Passage(ledger, table.layers, strategy.recompute)
        passage.enter(table.input_bytes, owned=False)
        weights.before_micro_batch()
        passage.forward(names, before=weights.before_forward, after=weights.after_forward)
        run_loss(ledger, table.loss, passage)
        passage.backward(weights.on_gradient, weights.before_backward, weights.after_layer)
        weights.after_backward(boundary=number == count - 1)
    weights.step()
    return DevicePrediction(
        device="cpu" if strategy.device_type == "cpu" else "cuda:0", timeline=ledger.timeline()
    )


def _weights(ledger: Ledger, parameters: Parameters, strategy: Strategy) -> Weights:
    if strategy.zero.stage in (1, 2):
        # The rank that needs most: stage 2 gets its gradients from the last layers on, stage 1 from the first.
        worst = strategy.data_world - 1 if strategy.zero.stage == 2 else 0
        return FlatWeights(ledger, parameters, strategy, rank=worst)
    if strategy.zero.stage == 3:
        return ShardedWeights(ledger, parameters, strategy, strategy.layers)
    return WholeWeights(ledger, parameters, strategy)
