"""The ``vlfit plan`` command that an error gives to paste."""

import shlex


def plan_command(
    model: str,
    gpu: str,
    *,
    gpus_per_node: int,
    nodes: int,
    global_batch: int,
    memory_gib: float | None = None,
) -> str:
    """Give the command that looks for a plan of the same global batch; ``memory_gib`` where it is not the GPU's."""
    memory = "" if memory_gib is None else f"--memory {memory_gib:.3g} "
    return (
        f"vlfit plan --model {shlex.quote(model)} --gpu {shlex.quote(gpu)} {memory}"
        f"--gpus-per-node {max(1, gpus_per_node)} --nodes {nodes} --global-batch {global_batch}"
    )
