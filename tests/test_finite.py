"""Steps whose loss or gradients are not finite: skipped, weights and schedule untouched, then training goes on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_train import engine_for, write_config

PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_step_that_is_not_finite_is_skipped(
    precision: str, stage: int, process_group: None, tiny_spec_file: Path, tiny_data: Path, tmp_path: Path
) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}
    config = write_config(
        tmp_path, scheduler=scheduler, zero_optimization={"stage": stage}, **PRECISIONS[precision]
    )
    engine, batches = engine_for(config, tiny_spec_file, tiny_data, total_steps=10)
    for _ in range(2):  # the schedule is at 0 before its first step and after it
        engine.train_step(next(batches))
    before = engine.named_tensors()
    broken = [batch._replace(weight=float("nan")) for batch in next(batches)]
    skipped = engine.train_step(broken)
    after = engine.named_tensors()
    following = engine.train_step(next(batches))
    moved = engine.named_tensors()
    engine.close()
    assert skipped.overflow and not following.overflow and np.isfinite(following.loss)
    assert following.lr == skipped.lr  # the schedule has not advanced
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert any(not torch.equal(moved[key], after[key]) for key in after)
