"""The layer table: what each distinct layer allocates, computes and moves, without memory or arithmetic.

Twelve equal BERT layers are one row. A row depends on the layer's modules, on which slots of the state carry a
gradient into it, and on which get one from above: the last fusion layer differs from the others in that.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from launcher.config.training import Precision
from launcher.memory.cache import cached
from launcher.memory.tracing import Trace, Work
from models.spec import ModelSpec

Cost = Work
"""Work of one pass through a layer: ``flops``, and the bytes that matrix products and all others move."""


@dataclass(frozen=True)
class LayerRow:
    """One distinct layer, for given rows, lengths, precision and device type."""

    kind: str
    """Name of the first layer like this, such as ``text.layer.0``."""
    parameters: tuple[int, ...]
    """Elements of each parameter, in order."""
    trainable: bool
    kept_bytes: int
    """Kept from forward to backward without recomputation; shared storages counted once, boundaries left out."""
    kept_recomputed_bytes: int
    """The same with recomputation (usually 0: only the boundary is kept)."""
    boundary_bytes: int
    """New tensors that the layer hands on (they stay while it or a later layer needs them for backward)."""
    forward_peak_bytes: int
    """Highest point during forward above its start, boundaries and kept tensors included."""
    backward_peak_bytes: int
    """Highest point during backward above its start (what was kept is still there at the start)."""
    recompute_peak_bytes: int
    """The same for recompute-then-backward."""
    forward: Cost
    backward: Cost
    plain: Trace | None = None
    recomputed: Trace | None = None
    owners: tuple[str, ...] = ()
    """Of each parameter its module's class and its name there, such as ``Linear.weight``."""

    @classmethod
    def of(cls, kind: str, plain: Trace, recomputed: Trace, owners: tuple[str, ...] = ()) -> "LayerRow":
        """Sum up two traces."""
        made = sum(size for size, origin in zip(plain.outputs, plain.passes, strict=True) if origin < 0)
        return cls(
            kind=kind,
            parameters=plain.parameters,
            trainable=any(plain.trainable),
            kept_bytes=plain.kept_bytes,
            kept_recomputed_bytes=recomputed.kept_bytes,
            boundary_bytes=made,
            forward_peak_bytes=_highest(plain.forward),
            backward_peak_bytes=_highest(plain.backward),
            recompute_peak_bytes=_highest(recomputed.backward),
            forward=plain.forward_work,
            backward=plain.backward_work,
            plain=plain,
            recomputed=recomputed,
            owners=owners,
        )

    def trace(self, recompute: bool) -> Trace:
        """The events with or without recomputation."""
        trace = self.recomputed if recompute else self.plain
        assert trace is not None
        return trace


@dataclass(frozen=True)
class LayerTable:
    """Rows by layer name; equal layers share one row object."""

    spec: ModelSpec
    precision: Precision
    rows_per_pass: int
    text_length: int
    layers: dict[str, LayerRow]
    loss: LayerRow
    input_bytes: tuple[int, ...] = ()
    """Bytes of each slot of the input state."""
    target_bytes: int = 0
    device_type: str = "cuda"

    @property
    def parameter_count(self) -> int:
        """Parameters of the model, shared ones once."""
        return sum(sum(row.parameters) for row in self.layers.values())


@lru_cache(maxsize=256)
def layer_table(
    spec: ModelSpec,
    *,
    precision: Precision,
    rows: int,
    text_length: int | None = None,
    device_type: str = "cuda",
    around: bool = False,
    zero_3: bool = False,
    ranks: int = 1,
    whole_rows: int | None = None,
) -> LayerTable:
    """Trace each distinct layer once on fake tensors; cached on disk by content.

    ``rows`` pass a layer at once. ``device_type`` decides which kernels are assumed (``cuda``: fused dropout and
    attention) though no device is touched. ``around``: the engine holds an autocast around the whole model, as
    DeepSpeed does, which keeps cast weights. ``zero_3``: recomputation is reentrant there, and the linear
    layer DeepSpeed's. ITC gathers from ``ranks``. ``whole_rows`` is what the
    loss sees where a pipeline has cut the batch into chunks (default: ``rows``).
    """
    length = text_length or spec.text.length
    key = {
        "spec": spec.model_dump(mode="json"),
        "precision": precision,
        "rows": rows,
        "length": length,
        "device": device_type,
        "around": around,
        "zero_3": zero_3,
        "ranks": ranks,
        "whole_rows": whole_rows or rows,
    }

    def trace() -> dict[str, Any]:
        return _trace_model(
            spec, precision, rows, length, device_type, around, zero_3, ranks, whole_rows or rows
        )

    traced = cached("layers", key, trace)
    distinct = [
        LayerRow.of(
            row["kind"],
            Trace.from_json(row["plain"]),
            Trace.from_json(row["recomputed"]),
            tuple(row.get("owners", ())),
        )
        for row in traced["rows"]
    ]
    return LayerTable(
        spec=spec,
        precision=precision,
        rows_per_pass=rows,
        text_length=length,
        layers={name: distinct[index] for name, index in traced["layers"].items()},
        loss=distinct[traced["loss"]],
        input_bytes=tuple(traced["input_bytes"]),
        target_bytes=traced["target_bytes"],
        device_type=device_type,
    )


def _trace_model(
    spec: ModelSpec,
    precision: Precision,
    rows: int,
    length: int,
    device_type: str,
    around: bool,
    zero_3: bool,
    ranks: int,
    whole_rows: int,
) -> dict[str, Any]:
    """Walk up the layers for their states, then down for what each gets from above; trace what is new."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from launcher.memory.kernels import kernels_of
    from launcher.memory.tracing import trace_layer
    from models.build import build_layers, layer_names
    from models.losses import Targets
    from models.state import example_state

    weights = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    autocast = {"autocast-fp16": torch.float16, "autocast-bf16": torch.bfloat16}.get(precision)

    def outside() -> contextlib.AbstractContextManager:
        if not (around and autocast):
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=autocast)

    names = layer_names(spec)
    few = {layer.name: layer for layer in build_layers(_shortened(spec), device="meta")}
    example = example_state(spec, rows, length=length, device="meta")
    with FakeTensorMode(), kernels_of(device_type, zero_3):
        for layer in few.values():
            _make_fake(layer, weights)
            layer.autocast = autocast
            layer.reentrant = zero_3
        state: tuple[torch.Tensor, ...] = tuple(_like(tensor) for tensor in example)
        input_bytes = [tensor.nbytes for tensor in state]
        states: dict[str, tuple[torch.Tensor, ...]] = {}
        after: dict[tuple, tuple[torch.Tensor, ...]] = {}
        for name in names:
            states[name] = state
            layer = few[_representative(name, spec)]
            seen = (layer.name, _signature(state))
            if seen not in after:
                with outside():
                    after[seen] = tuple(_like(tensor) for tensor in layer(state))
            state = after[seen]
        # Behind a pipeline the loss sees the chunks put together again.
        factor = whole_rows / rows
        outputs = tuple(_like(tensor, round(tensor.shape[0] * factor)) for tensor in state)
        targets = Targets(
            labels=torch.empty(whole_rows, spec.masked_positions, dtype=torch.int64),
            identities=torch.empty(whole_rows, 2, dtype=torch.int64),
        )
        objectives = _objectives(spec, ranks)

        def loss(state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
            return (objectives(state, targets).total,)

        loss_trace = trace_layer(loss, outputs, [])
        found: dict[tuple, int] = {}
        traced: list[dict[str, Any]] = []
        index: dict[str, int] = {}
        receives = loss_trace.sends
        for name in reversed(names):
            layer = few[_representative(name, spec)]
            key = (layer.name, _signature(states[name]), receives)
            if key not in found:
                both = []
                for recompute in (False, True):
                    layer.recompute = recompute
                    both.append(
                        trace_layer(
                            layer,
                            states[name],
                            list(layer.parameters()),
                            receives=receives,
                            around=outside(),
                        )
                    )
                found[key] = len(traced)
                traced.append(
                    {
                        "kind": name,
                        "plain": both[0].as_json(),
                        "recomputed": both[1].as_json(),
                        "owners": _owners(layer),
                    }
                )
            index[name] = found[key]
            receives = tuple(traced[index[name]]["plain"]["sends"])
        traced.append({"kind": "loss", "plain": loss_trace.as_json(), "recomputed": loss_trace.as_json()})
    return {
        "rows": traced,
        "layers": {name: index[name] for name in names},
        "loss": len(traced) - 1,
        "input_bytes": input_bytes,
        "target_bytes": sum(tensor.nbytes for tensor in targets),
    }


def _shortened(spec: ModelSpec) -> ModelSpec:
    """The same model with two layers of each kind: the first block of a ViT has no stochastic depth."""
    from models.build import layer_names

    blocks = sum(name.startswith("image.block.") for name in layer_names(spec))
    return spec.model_copy(
        update={
            "image": spec.image.model_copy(update={"depth": min(2, blocks)}),
            "text": spec.text.model_copy(update={"layers": 1}),
            "fusion": spec.fusion.model_copy(update={"layers": 1}),
        }
    )


def _representative(name: str, spec: ModelSpec) -> str:
    stem, _, number = name.rpartition(".")
    if not number.isdigit():
        return name
    return f"{stem}.{1 if stem == 'image.block' and int(number) and spec.image.drop_path else 0}"


def _owners(layer: Any) -> list[str]:
    """In the order of ``layer.parameters()``."""
    found = {
        id(parameter): f"{type(module).__name__}.{name}"
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    return [found[id(parameter)] for parameter in layer.parameters()]


def _make_fake(layer: Any, dtype: Any) -> None:
    """Give a meta layer weights of ``dtype`` on the (fake) CPU."""
    import torch

    for module in layer.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = torch.nn.Parameter(
                    torch.empty(parameter.shape, dtype=dtype), requires_grad=parameter.requires_grad
                )
        for key, buffer in module._buffers.items():
            if buffer is not None:
                kept = dtype if buffer.is_floating_point() else buffer.dtype
                module._buffers[key] = torch.empty(buffer.shape, dtype=kept)


def _like(tensor: Any, rows: int | None = None) -> Any:
    import torch

    shape = (rows or tensor.shape[0], *tensor.shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)


def _signature(state: Sequence[Any]) -> tuple:
    return tuple((tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad) for tensor in state)


def _objectives(spec: ModelSpec, ranks: int) -> Callable[..., Any]:
    """The losses as one of ``ranks`` computes them, without a process group."""
    import torch

    from models.losses import Objectives

    class Gathering(Objectives):
        """Puts its own rows in the place of the other ranks'."""

        def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor if ranks == 1 else torch.cat([tensor] * ranks)

    return Gathering(spec)


def _highest(events: Sequence[tuple[str, int, int]]) -> int:
    now = highest = 0
    for kind, a, b in events:
        if kind == "run":
            highest = max(highest, now + a)
            now += b
    return highest
