"""Which kernels a trace assumes. Tensors are fake and on the CPU; CUDA's choices are put in their place."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@contextlib.contextmanager
def kernels_of(device_type: str, zero_3: bool = False) -> Iterator[None]:
    """Trace as this device type would run.

    The linear layer is torch's own, or with ``zero_3`` DeepSpeed's: ``zero.Init`` (0.19.8) puts it in the other's place
    for the rest of the process, so that neither may be taken from there. All else is on ``cpu`` as it is, and on
    ``cuda`` with these in the place of the CPU's:

    - dropout: one fused kernel that keeps a mask of one byte per element (aten ``native_dropout``; the CPU
      keeps a mask of the activations' dtype).
    - scaled_dot_product_attention: a fused kernel that keeps query, key, value, output and one fp32 number per
      query and head (Dao et al., 2022, FlashAttention, algorithm 2), with dropout and masks inside.
    - layer_norm and softmax under autocast: in fp32 (torch.amp's list for CUDA).

    The functions are replaced, not intercepted by a mode: recomputation runs in the backward pass, where modes
    are off.
    """
    replaced: dict[str, Any] = {"linear": _linear_of_zero_3 if zero_3 else torch._C._nn.linear}
    if device_type == "cuda":
        replaced |= {
            "dropout": _dropout,
            "scaled_dot_product_attention": _attention,
            "layer_norm": _in_fp32(functional.layer_norm),
            "softmax": _in_fp32(functional.softmax),
        }
    originals = {name: getattr(functional, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(functional, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(functional, name, function)


def _in_fp32(function: Any) -> Any:
    def with_fp32(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu") and tensor.dtype in (torch.float16, torch.bfloat16):
            tensor = tensor.float()
        return function(tensor, *args, **kwargs)

    return with_fp32


def _linear_of_zero_3(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _Linear.apply(input, weight, bias)


class _Linear(torch.autograd.Function):
    """What DeepSpeed's linear layer keeps and makes (deepspeed/runtime/zero/linear.py, 0.19.8).

    It keeps input, weight and bias as they came in, not as autocast casts them, and casts again in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight, bias)
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        if bias is not None and input.dim() == 2:
            return torch.addmm(bias, input, weight.t())
        product = input.matmul(weight.t())
        return product if bias is None else product.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        enabled, dtype = ctx.autocast
        of_input = of_weight = of_bias = None
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            if needs_input:
                of_input = gradient.matmul(weight)
            if needs_weight:
                of_weight = gradient.flatten(0, -2).t().matmul(input.flatten(0, -2))
            if bias is not None and needs_bias:
                of_bias = gradient.sum(list(range(gradient.dim() - 1)))
        return of_input, of_weight, of_bias


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    return torch.ops.aten.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    return _FusedAttention.apply(query, key, value, attn_mask)


class _FusedAttention(torch.autograd.Function):
    """The shapes and lifetimes of a fused attention kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # FlashAttention writes [batch, length, heads, width]; torch hands out the transposed view.
        batch, heads, length, _width = query.shape
        out = torch.empty(batch, length, heads, value.shape[-1], dtype=query.dtype).transpose(1, 2)
        sums = torch.empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums, *([mask] if mask is not None else []))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
