"""Out of memory at run time: in which phase and layer, how much was there and how much expected, what to do."""

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from launcher.plan_command import plan_command
from models.errors import DoesNotFit

if TYPE_CHECKING:
    from launcher.session import Session

_PHASES = {
    "open_session": "load",
    "initialize": "initialise",
    "train_step": "forward",
    "backward": "backward",
    "step": "step",
    "evaluate": "evaluate",
    "save": "save",
}
"""Functions that begin a phase; the innermost one on the stack names it."""


class Watch:
    """The run, as soon as there is one."""

    session: "Session | None" = None


@contextlib.contextmanager
def out_of_memory_explained(model: str) -> Iterator[Watch]:
    """Turn an allocator's failure into one DoesNotFit; every other exception passes.

    ``model`` as it was asked for: a name or a file.
    """
    watch = Watch()
    try:
        yield watch
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFit(_explain(error, watch.session, model)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has a class of its own for it, torch's CPU allocator (c10/core/impl/alloc_cpu.cpp) a sentence."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "DefaultCPUAllocator: can't allocate memory" in str(error)


def place_of(trace: TracebackType | None) -> tuple[str, str]:
    """Phase and layer of a traceback; the layer is empty where none was running."""
    from models.layer import Layer

    phase, layer = "load", ""
    while trace is not None:
        frame = trace.tb_frame
        phase = _PHASES.get(frame.f_code.co_name, phase)
        this = frame.f_locals.get("self")
        if isinstance(this, Layer):
            layer = this.name
        trace = trace.tb_next
    return phase, layer


def _explain(error: BaseException, session: "Session | None", model: str) -> str:
    phase, layer = place_of(error.__traceback__)
    where = f"{phase} of {layer}" if layer else phase
    if session is None:
        return f"out of memory in {where}: {str(error).splitlines()[0]}"
    peaks = session.meter.peak_bytes()
    device, measured = max(peaks.items(), key=lambda item: item[1])
    line = f"out of memory in {where} on {device}: at most {measured / 2**20:,.0f} MiB were allocated"
    predicted = session.forecast.prediction
    if predicted is not None:
        worst = predicted.worst.peak
        items = sorted(worst.items.items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in items)
        line += f"; predicted {worst.total_bytes / 2**20:,.0f} ({parts})"
    command = plan_command(
        model,
        "cpu" if session.device.type == "cpu" else "A100-80",
        gpus_per_node=session.distributed.world_size // session.distributed.nodes,
        nodes=session.distributed.nodes,
        global_batch=session.plan.config.global_batch_size,
        memory_gib=measured / 2**30,
    )
    return f"{line}\nfor a plan that fits: {command}"
