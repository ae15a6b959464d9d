"""The state contract: what flows from layer to layer.

A plain tuple of six tensors, every one with the batch as dimension 0, the first one floating point.
FairScale splits it along dimension 0 and DeepSpeed sends it from rank to rank, so nothing else
(None, a flag, a mask of shape [1, 1, L, L]) may be in it.

    slot        at the input                    after fusion.embed              after head
    image       float [B,3,S,S] pixels          float [B,N,D]                   float [B,K,2] ITM logits
    text        int64 [B,L] token ids           float [B,K,L,D]                 float [B,M,V] MLM logits
    pairing     int32 [B,G] random bits         float32 [B,2,E] ITC features    the same
    mask        bool [B,L] real tokens          bool [B,K,L]                    the same
    keys        int64 [B,4] identities          bool [B,K] pair is usable       the same
    positions   int64 [B,M] masked tokens       the same                        the same

B batch, S image side, N image tokens, L text tokens, D width, K captions per image, G rows of an ITM
group, E width of the ITC space, M masked tokens per row, V vocabulary.

``keys`` are (image id, caption id, ITM group, place in the group). A slot is an integer tensor until it
carries a gradient: DeepSpeed's pipeline expects a gradient for every floating tensor that it sends.
Hence ``pairing`` keeps its random bits where ITC is off.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models.spec import ModelSpec


class State(NamedTuple):
    """The six slots by name. Layers unpack it and return a plain tuple of the same arity."""

    image: Tensor
    text: Tensor
    pairing: Tensor
    mask: Tensor
    keys: Tensor
    positions: Tensor


class StateError(RuntimeError):
    """A layer broke the state contract: a programming error, never a user's."""


def check_state(state: tuple, where: str, rows: int | None = None) -> int:
    """Check arity and batch sizes at a layer's boundary; gives the number of rows.

    FairScale scatters every tensor along dimension 0: a mask of shape [1,1,L,L] silently turns 8 rows
    into 2. So all sizes must agree, and as many rows must leave a layer as entered it.
    """
    if not isinstance(state, tuple) or len(state) != len(State._fields):
        raise StateError(
            f"{where}: the state is a tuple of {len(State._fields)} tensors, not {_describe(state)}"
        )
    sizes = {field: tensor.shape[0] for field, tensor in zip(State._fields, state, strict=True)}
    expected = sizes["image"] if rows is None else rows
    wrong = {field: size for field, size in sizes.items() if size != expected}
    if wrong:
        field, size = next(iter(wrong.items()))
        raise StateError(
            f"{where}: '{field}' has {size} rows where {expected} are expected; dimension 0 is the batch"
        )
    return expected


def example_state(
    spec: ModelSpec,
    rows: int,
    *,
    length: int | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> tuple[Tensor, ...]:
    """Give a valid random input state of ``rows`` rows: for profiling, timing and tests."""
    generator = torch.Generator().manual_seed(seed)
    length = length or spec.text.length
    masked = spec.masked_positions
    index = torch.arange(rows)
    # Token 0 is commonly [PAD]; any other id will do.
    ids = torch.randint(1, spec.text.vocab_size, (rows, length), generator=generator)
    state = State(
        image=torch.randn(rows, 3, spec.image.size, spec.image.size, generator=generator),
        text=ids,
        pairing=torch.randint(0, 2**31 - 1, (rows, spec.group), generator=generator, dtype=torch.int32),
        mask=torch.ones(rows, length, dtype=torch.bool),
        keys=torch.stack([index, index, index // spec.group, index % spec.group], dim=1),
        positions=torch.randint(1, max(2, length - 1), (rows, masked), generator=generator),
    )
    return tuple(tensor.to(device) for tensor in state)


def _describe(state: object) -> str:
    if isinstance(state, tuple):
        return f"a tuple of {len(state)} ({', '.join(type(item).__name__ for item in state)})"
    return type(state).__name__
