"""The wrapper around every layer: autocast, recomputation, and the check of the state contract.

These belong inside the layer, not around the model: FairScale runs stages in worker threads, which an
outer autocast does not reach, and its own checkpointing hangs under DistributedDataParallel, whereas
non-reentrant recomputation inside the layer works everywhere.
"""

import contextlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.names import is_repeated, select
from models.state import check_state


class Layer(nn.Module):
    """One named layer of the flat list: ``tuple of tensors → tuple of tensors``.

    ``module`` takes the six slots of the state as arguments. ``recompute`` drops its activations in
    the forward pass and computes them again in the backward pass. ``autocast`` is a dtype, or None for
    the dtype of the parameters. ``reentrant`` is for ZeRO-3 alone, whose hooks free gathered weights at the
    end of the recomputed forward pass: only the reentrant kind builds a graph of its own that gathers them again.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.module = module
        self.recompute = False
        self.autocast: torch.dtype | None = None
        self.reentrant = False

    def forward(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rows = check_state(state, f"into {self.name}")
        with self._precision(state[0].device.type):
            if self.recompute and torch.is_grad_enabled() and self._needs_gradient(state):
                out = self._checkpoint(state)
            else:
                out = self.module(*state)
        check_state(out, f"out of {self.name}", rows)
        return out

    def _needs_gradient(self, state: tuple[Tensor, ...]) -> bool:
        """False in a frozen tower: nothing is kept for backward there, so there is nothing to recompute."""
        return any(tensor.requires_grad for tensor in (*state, *self.module.parameters()))

    def _checkpoint(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self.reentrant:
            return checkpoint(self.module, *state, use_reentrant=False)
        # Without an input that requires a gradient, reentrant recomputation would train nothing in here: a
        # frozen tower below, say. An empty tensor that requires one takes that role.
        anchor = torch.empty(0, device=state[0].device, requires_grad=True)
        return checkpoint(lambda _, *slots: self.module(*slots), anchor, *state, use_reentrant=True)

    def _precision(self, device_type: str) -> contextlib.AbstractContextManager:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device_type, dtype=self.autocast)

    def extra_repr(self) -> str:
        return f"{self.name}{', recompute' if self.recompute else ''}"


def repeated_names(layers: Iterable[Layer]) -> list[str]:
    """Give the names of the stacked layers: what a config with ``activation_checkpointing`` recomputes."""
    return [layer.name for layer in layers if is_repeated(layer.name)]


def set_recompute(layers: Sequence[Layer], patterns: Iterable[str]) -> list[str]:
    """Recompute exactly the layers that the patterns match; gives their names.

    Raises UserError for a pattern that matches nothing.
    """
    chosen = select([layer.name for layer in layers], patterns)
    for layer in layers:
        layer.recompute = layer.name in chosen
    return chosen


def set_autocast(layers: Iterable[Layer], dtype: torch.dtype | None) -> None:
    """Run the layers under autocast to ``dtype``; None runs them in the dtype of their parameters."""
    for layer in layers:
        layer.autocast = dtype


def named_tensors(layers: Iterable[Layer]) -> dict[str, Tensor]:
    """Give parameters and persistent buffers keyed by layer name.

    The keys, such as ``text.embed/embeddings.LayerNorm.weight``, do not depend on partition, engine or
    world size.
    """
    return {
        f"{layer.name}/{key}": tensor for layer in layers for key, tensor in layer.module.state_dict().items()
    }
