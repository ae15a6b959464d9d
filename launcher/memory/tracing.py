"""Tracing one layer: which storages its forward and backward make and free, in order, on fake tensors.

The layer runs under autograd as in a real run; a dispatch mode sees every operator and a finalizer on every
storage sees its end, so what is kept for backward is what autograd really keeps. What belongs to the
neighbours is cut out by two identity functions:

    state ─► _Enter ─► layer ─► _Leave ─►        forward, left to right
      ◄───── _Enter ◄─ layer ◄─ _Leave ◄─        backward: _Leave makes the gradients of the layer above,
                                                 _Enter takes over those that go to the layer below

The result is a ``Trace``: a list of events per pass, which ``simulate`` strings together layer by layer.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Event = tuple[str, int, int]
"""One thing that happens, as ``(kind, a, b)``:

    run      peak, net      operators raise the allocated bytes by at most ``peak`` and in the end by ``net``
    drop in  slot, 0        the layer's graph lets go of the tensor that came in at this slot
    drop out slot, 0        … of the tensor that it handed on
    gradient index, bytes   a finished gradient of this parameter leaves for ``.grad`` or an engine's hook
"""


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes moved by the operators of one pass."""

    flops: int
    matmul_bytes: int
    other_bytes: int


@dataclass(frozen=True)
class Trace:
    """One layer: its parameters, boundaries and events."""

    parameters: tuple[int, ...]
    """Elements of each parameter."""
    trainable: tuple[bool, ...]
    inputs: tuple[int, ...]
    """Bytes of each slot that comes in."""
    outputs: tuple[int, ...]
    """Bytes of each slot that goes out."""
    passes: tuple[int, ...]
    """For each slot that goes out: the slot that it came in as, or -1 where the layer made it."""
    floating: tuple[bool, ...]
    """Which outgoing slots carry a gradient."""
    keeps_in: tuple[bool, ...]
    """Which incoming tensors the graph keeps until backward …"""
    keeps_out: tuple[bool, ...]
    """… and which of those that it handed on."""
    sends: tuple[bool, ...]
    """Which incoming slots get a gradient."""
    cached_bytes: int
    """Weights cast by an autocast around the whole model and kept by it alone until its forward ends."""
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    forward_work: Work
    backward_work: Work

    @property
    def kept_bytes(self) -> int:
        """Kept from forward to backward, boundaries left out."""
        made = sum(size for size, origin in zip(self.outputs, self.passes, strict=True) if origin < 0)
        return sum(net for kind, _, net in self.forward if kind == "run") - made

    def as_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Trace":
        """Read what ``as_json`` gave, from a file or not."""
        values: dict[str, Any] = {
            key: tuple(tuple(item) if isinstance(item, list) else item for item in value)
            if isinstance(value, (list, tuple))
            else value
            for key, value in data.items()
        }
        for key in ("forward_work", "backward_work"):
            values[key] = Work(**values[key])
        return cls(**values)


def trace_layer(
    layer: Callable[..., Any],
    state: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
    *,
    receives: Sequence[bool] | None = None,
    around: contextlib.AbstractContextManager | None = None,
) -> Trace:
    """Trace ``layer(state) → tuple of tensors`` and its backward. Call inside a FakeTensorMode.

    ``parameters`` are the layer's own, in the order of the event ``gradient``. A slot of ``state`` takes part in
    autograd if it requires a gradient. ``receives`` says which outgoing slots get a gradient from above (default:
    all that can). ``around`` is a context that in a real run is held around the forward of the whole model.
    """
    recorder = _Recorder()
    anchor = torch.ones(1, requires_grad=True)
    inputs = [
        _Enter.apply(anchor, recorder, slot, torch.empty_like(tensor.detach()))
        if tensor.requires_grad
        else torch.empty_like(tensor)
        for slot, tensor in enumerate(state)
    ]
    origin = {_key(tensor): slot for slot, tensor in reversed(list(enumerate(inputs)))}
    sizes_in = tuple(_bytes(tensor) for tensor in inputs)
    hooks = [
        parameter.register_post_accumulate_grad_hook(recorder.gradient_hook(index))
        for index, parameter in enumerate(parameters)
        if parameter.requires_grad
    ]
    try:
        with recorder:
            with around or contextlib.nullcontext():
                outputs = list(layer(tuple(inputs)))
                forward, forward_work = recorder.take()
            cached_bytes = -sum(net for kind, _, net in recorder.take()[0] if kind == "run")
            passes = tuple(origin.get(_key(output), -1) for output in outputs)
            sizes_out = tuple(_bytes(output) for output in outputs)
            floating = tuple(bool(output.requires_grad) for output in outputs)
            made = {slot: output for slot, output in enumerate(outputs) if passes[slot] < 0}
            for slot, tensor in enumerate(inputs):
                recorder.watch(tensor, ("drop in", slot))
            for slot, tensor in made.items():
                recorder.watch(tensor, ("drop out", slot))
            roots = [
                _Leave.apply(output, recorder)
                for slot, output in enumerate(outputs)
                if output.requires_grad and (receives is None or receives[slot])
            ]
            # From here on only the graph holds the boundaries: what ends now is not kept for backward.
            inputs, outputs, made = [], [], {}
            del tensor, state
            dropped = {event[:2] for event in recorder.take()[0]}
            if roots:
                recorder.leaving = len(roots)
                torch.autograd.backward(roots)
            backward, backward_work = recorder.take()
    finally:
        for hook in hooks:
            hook.remove()
    return Trace(
        parameters=tuple(parameter.numel() for parameter in parameters),
        trainable=tuple(parameter.requires_grad for parameter in parameters),
        inputs=sizes_in,
        outputs=sizes_out,
        passes=passes,
        floating=floating,
        keeps_in=tuple(("drop in", slot) not in dropped for slot in range(len(sizes_in))),
        keeps_out=tuple(
            passes[slot] < 0 and ("drop out", slot) not in dropped for slot in range(len(sizes_out))
        ),
        sends=tuple(slot in recorder.sent for slot in range(len(sizes_in))),
        cached_bytes=cached_bytes,
        forward=forward,
        backward=backward,
        forward_work=forward_work,
        backward_work=backward_work,
    )


class _Recorder(TorchDispatchMode):
    """Sees every operator; keeps what is allocated, and the events since the last ``take``."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.boundaries: dict[int, tuple[str, int]] = {}
        self.leaving = 0
        self.sent: set[int] = set()
        self.ended = False
        self._start()

    def _start(self) -> None:
        self.current = self.peak = 0
        self.events: list[Event] = []
        self.flops = self.matmul_bytes = self.other_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        made = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        known = {_key(tensor) for tensor in inputs}
        fresh = [tensor for tensor in made if _key(tensor) not in known and _key(tensor) not in self.live]
        for tensor in fresh:
            self._allocate(tensor)
        if fresh or function._schema.is_mutable:
            moved = sum(tensor.nbytes for tensor in (*inputs, *made))
            count = flop_registry.get(function._overloadpacket)
            if count is not None:
                self.flops += count(*args, **kwargs, out_val=out)
                self.matmul_bytes += moved
            else:
                self.other_bytes += moved
        return out

    def _allocate(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.live:
            return
        self.live[key] = size
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        size = self.live.pop(key, 0)
        if self.ended:
            return
        boundary = self.boundaries.pop(key, None)
        if boundary is not None:
            self.note(*boundary, 0)
        else:
            self.current -= size

    def watch(self, tensor: Tensor, event: tuple[str, int]) -> None:
        """Report the end of this tensor's storage as an event of its own, not as bytes."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.boundaries:
            return
        self.boundaries[key] = event
        if key not in self.live:
            weakref.finalize(storage, self._freed, key).atexit = False

    def note(self, kind: str, a: int, b: int) -> None:
        """Add an event after what operators did so far."""
        self._flush()
        self.events.append((kind, a, b))

    def _flush(self) -> None:
        if self.peak or self.current:
            self.events.append(("run", self.peak, self.current))
        self.current = self.peak = 0

    def take(self) -> tuple[tuple[Event, ...], Work]:
        """Give events and work since the last call, and start anew."""
        self._flush()
        taken = tuple(self.events), Work(self.flops, self.matmul_bytes, self.other_bytes)
        self._start()
        return taken

    def left(self) -> None:
        """One gradient of the layer above exists; with the last of them the layer's own backward begins."""
        self.leaving -= 1
        if not self.leaving:
            self._start()

    def entered(self, slot: int) -> None:
        """A gradient for the layer below; with the first of them this layer's backward is over."""
        self.sent.add(slot)
        if not self.ended:
            self._flush()
            self.ended = True

    def gradient_hook(self, index: int) -> Callable[[Tensor], None]:
        """Give a hook that lets a finished gradient leave the layer's account."""

        def leave(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            size = self.live.pop(_key(gradient), 0)
            self.current -= size
            self.note("gradient", index, size)
            parameter.grad = None

        return leave


class _Enter(torch.autograd.Function):
    """Identity where a slot enters; its backward takes the gradient over."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recorder: _Recorder, slot: int, tensor: Tensor) -> Tensor:
        ctx.recorder, ctx.slot = recorder, slot
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None, None]:
        if gradient is not None:
            ctx.recorder.entered(ctx.slot)
        return None, None, None, None


class _Leave(torch.autograd.Function):
    """A scalar in place of everything above; its backward makes the gradient that would come from there."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, recorder: _Recorder) -> Tensor:
        ctx.recorder = recorder
        ctx.like = tensor.shape, tensor.dtype, tensor.device
        return torch.empty((), device=tensor.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        shape, dtype, device = ctx.like
        made = torch.empty(shape, dtype=dtype, device=device)
        ctx.recorder.left()
        return made, None


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
