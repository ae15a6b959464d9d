"""One given plan's memory and time, from the same files that a run would read."""

import argparse

from launcher.memory.hardware import find_hardware
from launcher.memory.planned import Planned
from launcher.memory.search import Limits, evaluate
from launcher.memory.simulate import predict
from launcher.memory.strategy import Strategy
from launcher.memory.timing import Cluster
from launcher.plan import make_plan
from models.errors import UserError


def estimate(arguments: argparse.Namespace) -> tuple[Planned, int]:
    """Give the plan's costs, and the memory of a device. Raises UserError as a run would before it starts."""
    hardware = find_hardware(arguments.gpu)
    plan = make_plan(
        config=arguments.config,
        model=arguments.model,
        partition=arguments.partition,
        pipeline=arguments.pipeline,
        steps=1,
        epochs=None,
        samples=0,
        world_size=arguments.world_size,
        device=hardware.support,
    )
    strategy = Strategy.of(plan, arguments.world_size, hardware.device_type)
    per_node = arguments.gpus_per_node or min(8, strategy.gpus)
    if strategy.gpus % per_node:
        raise UserError(
            f"--gpus-per-node {per_node} does not divide the {strategy.gpus} devices of this plan"
        )
    hardware = find_hardware(arguments.gpu, per_node)
    if arguments.memory:
        hardware = hardware.with_memory(arguments.memory)
    cluster = Cluster(hardware, strategy.gpus // per_node, per_node)
    limits = Limits(hardware.memory_bytes, hardware.host_memory_bytes)
    label = f"{len(strategy.recompute)} layers" if strategy.recompute else "none"
    return evaluate(strategy, cluster, limits, predict(strategy), label), hardware.memory_bytes
