"""``vlfit estimate``: one given plan, read as a run reads it."""

import json
from pathlib import Path

import pytest
import yaml
from conftest import TINY

from launcher.cli import main


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A model, a partition of two stages, and a config."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    split = {
        "model": "tiny",
        "chunks": 2,
        "stages": [
            {"name": "image", "layers": ["image.*"], "device": 0},
            {"name": "rest", "layers": ["text.*", "fusion.*", "head"], "device": 1},
        ],
    }
    (tmp_path / "split.yaml").write_text(yaml.safe_dump(split))
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return {name: str(tmp_path / name) for name in ("tiny.yaml", "split.yaml", "config.json")}


def _estimate(files: dict[str, str], *options: str) -> list[str]:
    return ["estimate", "--config", files["config.json"], "--model", files["tiny.yaml"], *options]


def test_items_add_up_to_the_peak_and_weights_are_what_they_are(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    from models.build import build_layers, parameter_count
    from models.spec import load_spec

    assert main(_estimate(files, "--gpu", "A100-40", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    (device,) = found["peak_bytes"]
    assert sum(found["items"][device].values()) == found["peak_bytes"][device]
    weights = parameter_count(build_layers(load_spec(files["tiny.yaml"]), device="meta"))
    assert found["items"][device]["parameters"] == 4 * weights
    assert found["items"][device]["optimizer state"] == 8 * weights
    assert found["step_seconds"] > 0
    assert found["phase"][device].split()[0] in ("forward", "backward", "step", "loss", "initialise")


def test_table_says_what_the_peak_consists_of(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_estimate(files, "--gpu", "A100-40", "--memory", "0.001")) == 0
    shown = capsys.readouterr().out
    assert "optimizer state" in shown
    assert "MiB too many" in shown


def test_the_format_that_the_gpu_lacks_is_refused(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(Path(files["config.json"]).read_text()) | {"bf16": {"enabled": True}}
    Path(files["config.json"]).write_text(json.dumps(config))
    assert main(_estimate(files, "--gpu", "T4")) == 2
    assert "bf16 is not supported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, ["--gpu", "K80"], "K80: not known"),
        ({}, ["--world-size", "0"], "--world-size 0: at least 1"),
        ({}, ["--world-size", "3"], "train_batch_size 16 cannot be split"),
        ({}, ["--pipeline", "deepspeed"], "needs a --partition"),
        (
            {"zero_optimization": {"stage": 3}},
            ["--partition", "split"],
            "cannot be combined with the 2 stages",
        ),
        ({"model": "other"}, ["--partition", "split"], "made for model 'other'"),
        (
            {},
            ["--partition", "split", "--pipeline", "deepspeed", "--world-size", "3"],
            "a process for each of the 2",
        ),
        (
            {},
            ["--gpu", "T4", "--gpus-per-node", "3", "--world-size", "4"],
            "--gpus-per-node 3 does not divide",
        ),
        ({}, ["--memory", "-1"], "--memory -1"),
    ],
)
def test_contradictions_are_one_line(
    change: dict, options: list[str], message: str, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = "split.yaml" if "model" in change else "config.json"
    data = yaml.safe_load(Path(files[name]).read_text()) | change
    Path(files[name]).write_text(json.dumps(data))
    options = [files["split.yaml"] if word == "split" else word for word in options]
    assert main(_estimate(files, *options)) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1
