"""The layer table is that of the model, whatever this process did before."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from launcher.memory import kernels
from launcher.memory.table import _trace_model
from models.spec import load_spec


def trace(precision: Any, zero_3: bool) -> dict[str, Any]:
    return _trace_model(load_spec("demo"), precision, 4, 20, "cpu", True, zero_3, 1, 4)


def test_a_trace_does_not_see_the_linear_that_deepspeed_leaves_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    plain = trace("autocast-bf16", zero_3=False)
    monkeypatch.setattr(
        functional, "linear", zero3_linear_wrap
    )  # as ZeRO 3 does, for the rest of the process
    assert trace("autocast-bf16", zero_3=False) == plain


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast-bf16"])
def test_zero_3_is_traced_with_a_linear_layer_like_deepspeeds(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    ours = trace(precision, zero_3=True)
    assert ours != trace(precision, zero_3=False)
    monkeypatch.setattr(kernels, "_linear_of_zero_3", zero3_linear_wrap)
    assert trace(precision, zero_3=True) == ours


def test_linear_of_zero_3_computes_what_torchs_does() -> None:
    for shape in ((5, 3), (2, 5, 3)):
        input = torch.randn(shape, requires_grad=True)
        weight, bias = torch.randn(4, 3, requires_grad=True), torch.randn(4, requires_grad=True)
        results = []
        for linear in (functional.linear, kernels._linear_of_zero_3):
            out = linear(input, weight, bias)
            results.append([out, *torch.autograd.grad(out.square().sum(), (input, weight, bias))])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)
