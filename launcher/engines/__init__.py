"""Engines: how a list of layers is trained. ZeRO, FairScale Pipe, DeepSpeed's pipeline.

``launcher.engines.engine`` says what every engine offers; the training loop knows nothing more.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from launcher.distributed import Distributed
    from launcher.engines.engine import Engine
    from launcher.plan import TrainPlan
    from models.layer import Layer
    from models.losses import Objectives


def build_engine(
    layers: "Sequence[Layer]",
    plan: "TrainPlan",
    objectives: "Objectives",
    distributed: "Distributed",
    devices: "Sequence[torch.device]",
) -> "Engine":
    """Give the engine that the plan names, holding the layers on the devices of this rank."""
    if plan.pipeline == "zero":
        from launcher.engines.zero import ZeroEngine

        return ZeroEngine(layers, plan.config, objectives, distributed, devices[0])
    assert plan.partition is not None
    if plan.pipeline == "deepspeed":
        from launcher.engines.deepspeed_pipe import DeepSpeedPipeEngine

        return DeepSpeedPipeEngine(layers, plan.partition, plan.config, objectives)
    from launcher.engines.fairscale_pipe import FairScalePipeEngine

    return FairScalePipeEngine(
        layers, plan.partition, plan.config, objectives, distributed, plan.steps, devices
    )
