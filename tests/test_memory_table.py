"""The layer table is that of the model, whatever this process did before."""

import pytest
from torch.nn import functional

from launcher.memory.table import _trace_model
from models.spec import load_spec


def test_a_trace_does_not_see_the_linear_that_deepspeed_leaves_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    def trace() -> dict:
        return _trace_model(load_spec("demo"), "autocast-bf16", 4, 20, "cpu", True, False, 1, 4)

    plain = trace()
    monkeypatch.setattr(
        functional, "linear", zero3_linear_wrap
    )  # as ZeRO 3 does, for the rest of the process
    assert trace() == plain
