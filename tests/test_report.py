"""``vlfit report``: the table of runs, and pictures that show what the data says."""

import json
from pathlib import Path

import pytest
import yaml
from conftest import TINY

from launcher.cli import main
from launcher.memory.prediction import DevicePrediction, Moment, Prediction
from launcher.plots import draw_memory, draw_run, stack_memory

MIB = 2**20


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run of three steps."""
    folder = tmp_path / "run"
    (folder / "plan").mkdir(parents=True)
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
    }
    (folder / "plan" / "config.json").write_text(json.dumps(config))
    (folder / "plan" / "model.yaml").write_text(yaml.safe_dump(TINY))
    metrics = [
        {"step": step, "loss": 3.0 / step, "losses": {"itc": 2.0 / step}, "samples_per_second": 10.0 * step}
        for step in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    summary = {
        **{"engine": "zero", "precision_used": "fp32", "world_size": 1, "recomputed_layers": 0, "steps": 3},
        **{"loss_first": 3.0, "loss_last": 1.0, "samples_per_second": 20.0, "step_seconds_median": 0.4},
        **{"peak_allocated_bytes": {"cpu": 100 * MIB}, "predicted_peak_bytes": {"cpu": 101 * MIB}},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _change(run: Path, **values: object) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | values))


def test_predicted_stands_beside_measured(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--json", "--no-plot"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["predicted_peak_bytes"], row["measured_peak_bytes"]) == (101 * MIB, 100 * MIB)
    assert row["error"] == pytest.approx(0.01)
    assert main(["report", str(run), "--no-plot"]) == 0
    shown = capsys.readouterr().out
    assert "+1.0 %" in shown
    assert "3.000 → 1.000" in shown
    assert not (run / "report.png").exists()


def test_a_run_without_prediction_is_shown_all_the_same(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _change(run, predicted_peak_bytes=None)
    assert main(["report", str(run), "--json", "--no-plot"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["error"] is None


def test_a_run_is_drawn_with_its_memory(run: Path) -> None:
    assert main(["report", str(run)]) == 0
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", None, "holds no finished run"),
        ("summary.json", "{", "cannot be read"),
        ("metrics.jsonl", "", "took no step"),
    ],
)
def test_an_unfinished_or_damaged_run_is_one_line(
    name: str, content: str | None, message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).unlink() if content is None else (run / name).write_text(content)
    assert main(["report", str(run)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1


def _device() -> DevicePrediction:
    return DevicePrediction(
        "cuda:0",
        (
            Moment("load", "model", {"parameters": 100 * MIB}),
            Moment("forward", "a.0", {"parameters": 100 * MIB, "activations": 50 * MIB}),
            Moment(
                "backward", "a.0", {"parameters": 100 * MIB, "activations": 60 * MIB, "gradients": 40 * MIB}
            ),
        ),
    )


def test_the_stack_is_as_high_as_the_timeline() -> None:
    from matplotlib import pyplot
    from matplotlib.patches import StepPatch

    figure, axis = pyplot.subplots()
    stack_memory(axis, _device(), limit_bytes=300 * MIB, measured_bytes=190 * MIB)
    tops = [
        max(values)
        for values in zip(*(patch.get_data().values for patch in _of(axis, StepPatch)), strict=True)
    ]
    assert tops == [100.0, 150.0, 200.0]
    lines = {
        line.get_label(): line.get_ydata()[0] for line in axis.lines if not line.get_label().startswith("_")
    }
    assert lines == {"limit": 300.0, "measured peak": 190.0}
    assert axis.get_ylim()[1] > 300
    pyplot.close(figure)


def test_a_limit_far_above_is_said_and_not_drawn() -> None:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots()
    stack_memory(axis, _device(), limit_bytes=40 * 2**30)
    assert "limit 40.00 GiB" in [text.get_text() for text in axis.texts]
    assert axis.get_ylim()[1] < 300
    pyplot.close(figure)


def test_pictures_are_written_or_the_reason_is_given(tmp_path: Path) -> None:
    from models.errors import UserError

    prediction = Prediction((_device(),))
    draw_memory(prediction, tmp_path / "memory.png", limit_bytes=2**30, title="tiny")
    metrics = [{"step": 1, "loss": 1.0, "samples_per_second": 1.0}]
    draw_run(metrics, tmp_path / "run.png", title="one step")
    for name in ("memory.png", "run.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot be written"):
        draw_memory(prediction, tmp_path / "no" / "folder.png")


def _of(axis, kind: type) -> list:
    return [patch for patch in axis.patches if isinstance(patch, kind)]
