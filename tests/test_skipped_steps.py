"""When steps without finite numbers end a run, and what it says."""

import json
import math
import subprocess
import sys
from pathlib import Path

from launcher.config.training import LossScale
from launcher.engines.engine import StepResult
from launcher.skipped_steps import why_to_stop

DYNAMIC = LossScale(dynamic=True, initial=65_536.0, window=1000, hysteresis=1, minimum=1.0)


def step(overflow: bool, loss: float = 1.0, scale: float = 1.0) -> StepResult:
    return StepResult(loss, {}, {}, 0.1, None, scale, overflow)


def test_only_skipped_steps_in_a_row_count() -> None:
    bad = step(True, math.nan)
    assert why_to_stop([bad, bad, step(False)], 2, None, [1]) is None
    assert why_to_stop([bad, step(False), bad], 2, None, [1]) is None
    reason = why_to_stop([step(False), bad, bad], 2, None, [7, 9])
    assert reason is not None and "2 steps in a row" in reason and "7, 9" in reason


def test_a_dynamic_scale_may_find_its_value_but_not_fall_below_its_minimum() -> None:
    falling = [step(True, scale=2.0**power) for power in range(16, 1, -1)]
    assert why_to_stop(falling, 3, DYNAMIC, [1]) is None
    assert why_to_stop([step(True, math.nan, 8.0)] * 3, 3, DYNAMIC, [1]) is not None
    reason = why_to_stop([*falling, step(True, scale=1.0)], 100, DYNAMIC, [1])
    assert reason is not None and "at its minimum" in reason and "16, 8, 4, 1" in reason


def test_a_run_that_diverged_stops_with_its_samples_and_advice(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    optimizer = {"type": "AdamW", "params": {"lr": 1e30}}
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer}))
    command = [sys.executable, "launcher/train.py", f"--config={config}", f"--output={tmp_path}/run"]
    options = ["--device=cpu", "--no-eval", "--steps=20", "--max-skipped=3", "--save-every=none"]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr[-2000:]
    said = ended.stderr[ended.stderr.index("vlfit train (rank 0):") :]
    assert "3 steps in a row" in said and "samples of the last step" in said and "lower learning rate" in said
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["overflow"] for row in steps[-3:]] == [True] * 3 and not steps[0]["overflow"]
