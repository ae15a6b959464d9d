"""What a stage of DeepSpeed's pipeline holds beside activations, where it is not as without a pipeline.

    fp32, autocast     ZeRO 0: as without a pipeline (``WholeWeights``)
    fp32, autocast …   ZeRO 1: ``StageFlatWeights``
    bf16               ZeRO 0: ``Bf16Weights``, partitioned over the replicas although the stage says 0
                       ZeRO 1: ``StageFlatWeights``

Which of them is chosen: deepspeed/runtime/engine.py, ``_do_optimizer_sanity_check`` (0.19.8).
"""

from dataclasses import replace

from launcher.memory.flat_weights import FlatWeights
from launcher.memory.ledger import Ledger
from launcher.memory.strategy import Strategy
from launcher.memory.weights import (
    OPTIMIZER_STATES,
    AlwaysThere,
    Key,
    Parameters,
    Weights,
    WholeWeights,
    build_model,
    optimizer_temporary,
)


def stage_weights(ledger: Ledger, parameters: Parameters, strategy: Strategy) -> Weights:
    """The weights of one stage, on the replica that needs most."""
    if strategy.zero.stage == 1:
        return StageFlatWeights(ledger, parameters, strategy)
    if strategy.precision == "bf16":
        return Bf16Weights(ledger, parameters, strategy)
    return WholeWeights(ledger, parameters, strategy)


class StageFlatWeights(FlatWeights):
    """ZeRO 1 within a stage (deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8).

    The hook of the first gradient makes a bucket (``setup_buckets``), and ``reduce_gradients(pipeline_parallel=True)``
    makes another, which nothing uses, of the dtype that is communicated. Both are freed when gradients are reduced.
    There is no overlap under a pipeline (``_configure_zero_optimizer`` in runtime/engine.py turns it off).
    """

    def __init__(self, ledger: Ledger, parameters: Parameters, strategy: Strategy) -> None:
        without_overlap = replace(strategy, zero=replace(strategy.zero, overlap_comm=False))
        # Gradients are reduced in the order of the model: the first replica makes room for its own while all are there.
        super().__init__(ledger, parameters, without_overlap, rank=0)

    def after_backward(self, boundary: bool) -> None:
        if not boundary:
            return
        width = self.communicated + (self.width if self.communicated != self.width else 0)
        buffers = self.ledger.held("communication")
        own = self.width * self.zero.reduce_bucket_size * (1 + (self.communicated != self.width))
        self.ledger.begin("step", "reduce gradients")
        self.ledger.add("communication", width * self.zero.reduce_bucket_size)
        super().after_backward(boundary)
        # What stays are the buffers that stages receive into.
        self.ledger.add("communication", buffers - own)


class Bf16Weights(AlwaysThere):
    """bf16 without ZeRO (deepspeed/runtime/bf16_optimizer.py, 0.19.8); see ``launcher.memory.weights.Weights``.

    Flat: parameters and accumulated gradients in bf16, and this replica's equal part of the masters and of the
    optimizer state in fp32. Beside them each parameter's own gradient, which ``backward_prologue`` sets to zero and
    only ``zero_grad`` after the step frees.
    """

    width = 2

    def __init__(self, ledger: Ledger, parameters: Parameters, strategy: Strategy) -> None:
        self.ledger, self.parameters, self.strategy = ledger, parameters, strategy
        self.states = OPTIMIZER_STATES.get(strategy.optimizer, 2)
        align = 2 * strategy.data_world  # nccl_start_alignment_factor
        self.flat = -(-parameters.trained_elements // align) * align
        self.partition = self.flat // strategy.data_world
        self.gradients: dict[Key, int] = {}

    def load(self) -> None:
        build_model(self.ledger, self.parameters, self.width)

    def initialise(self) -> None:
        self.ledger.begin("initialise", "optimizer")
        self.ledger.add("parameters", 2 * self.flat)
        self.ledger.add("parameters", -2 * self.parameters.trained_elements)
        self.ledger.spike("temporary", (2 + 4) * self.partition)
        self.ledger.add("master weights", 4 * self.partition)
        self.ledger.add("gradients", 2 * self.flat)
        self.ledger.add("optimizer state", 4 * self.states * self.partition)

    def on_gradient(self, layer: str, index: int, size: int) -> None:
        if (layer, index) not in self.gradients:
            self.gradients[layer, index] = size
            self.ledger.add("gradients", size)

    def after_backward(self, boundary: bool) -> None:
        """Nothing: the flat gradients are one tensor, which is reduced in place (``_bf16_reduce_grads``)."""

    def step(self) -> None:
        self.ledger.begin("step", "optimizer")
        self.ledger.spike("temporary", 4 * self.parameters.largest)  # get_global_norm_of_tensors
        self.ledger.add("temporary", 4 * self.partition)
        self.ledger.spike("temporary", optimizer_temporary(self.strategy, [self.partition]))
        self.ledger.add("temporary", -4 * self.partition)
        self.ledger.add("gradients", -sum(self.gradients.values()))
        self.gradients.clear()
