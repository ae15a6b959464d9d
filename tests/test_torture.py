"""Six of the kills of ``tests/bench/torture.py``: SIGKILL to real runs, also while they save."""

import json
import subprocess
import sys
from pathlib import Path

TORTURE = Path(__file__).parent / "bench" / "torture.py"


def test_runs_that_are_killed_at_random_go_on_and_end_as_if_nothing_was(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    cases = ["zero-3", "deepspeed"]
    command = [sys.executable, str(TORTURE), "--kills=6", "--seed=5", f"--json={found}", "--cases", *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    outcomes = json.loads(found.read_text())
    assert [outcomes[case]["kills"] for case in cases] == [3, 3]
    assert all(outcome["problems"] == [] for outcome in outcomes.values())
