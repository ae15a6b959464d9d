"""``vlfit compare`` and ``vlfit doctor`` as a user starts them."""

import json
from pathlib import Path

import pytest
from test_train import write_config

from launcher.cli import main


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """ninja lies beside the interpreter, where an activated environment would have it on PATH."""
    import os
    import sys

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def test_compare_measures_each_config_beside_the_first(
    tmp_path: Path, tiny_spec_file: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str], on_path: None
) -> None:
    first = write_config(tmp_path, "plain.json")
    second = write_config(tmp_path, "recompute.json", bf16={"enabled": True}, activation_checkpointing={})
    arguments = ["--config", str(first), str(second), f"--model={tiny_spec_file}", f"--data={tiny_data}"]
    assert main(["compare", *arguments, "--steps=3", f"--output={tmp_path / 'runs'}", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [(run["config"], run["precision"], run["recomputed_layers"]) for run in runs] == [
        ("plain", "fp32", 0),
        ("recompute", "bf16", 6),
    ]
    assert runs[0]["memory_ratio"] == 1 and runs[1]["memory_ratio"] == pytest.approx(
        runs[1]["peak_allocated_bytes"] / runs[0]["peak_allocated_bytes"]
    )
    summaries = sorted((tmp_path / "runs").glob("*/summary.json"))
    peaks = [json.loads(path.read_text())["peak_allocated_bytes"]["cpu"] for path in summaries]
    assert peaks == [run["peak_allocated_bytes"] for run in runs]
    assert [run["predicted_peak_bytes"] for run in runs] == pytest.approx(peaks, rel=0.04)


def test_compare_passes_on_what_a_run_says(
    tmp_path: Path, tiny_spec_file: Path, capsys: pytest.CaptureFixture[str], on_path: None
) -> None:
    config = write_config(tmp_path)
    arguments = ["--config", str(config), f"--model={tiny_spec_file}", f"--data={tmp_path / 'nowhere'}"]
    assert main(["compare", *arguments, f"--output={tmp_path / 'runs'}"]) == 2
    assert "exit code 3" in capsys.readouterr().err


def test_doctor_finds_what_this_machine_has(capsys: pytest.CaptureFixture[str], on_path: None) -> None:
    assert main(["doctor", "--json"]) == 0
    found = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["torch"]["state"] == found["ninja"]["state"] == found["g++"]["state"] == "ok"


def test_doctor_says_what_is_missing_and_how_to_mend_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["doctor", "--json"]) == 2
    found = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["ninja"]["state"] == "missing" and "pip install ninja" in found["ninja"]["mend"]
