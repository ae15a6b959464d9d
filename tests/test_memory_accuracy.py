"""Predicted against measured peak memory: five of the plans of ``tests/bench/accuracy.py``, trained for real."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("bench")))
import accuracy
from accuracy import Case

CASES = [
    Case("demo", "fp32", "fusion", 16),
    Case("demo", "bf16", "none", 8, accumulation=2),
    Case("demo", "autocast", "all", 8, zero=2, bucket=200_000),
    Case("demo", "fp32", "none", 8, zero=3, ranks=2, bucket=300_000),
    Case("demo", "fp32", "fusion", 16, 2, pipeline="fairscale", chunks=4),
]


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, tuple[int, list[int] | str]]]:
    folder = tmp_path_factory.mktemp("accuracy")
    words = {case: accuracy.write_plan(case, folder / "plans" / str(i)) for i, case in enumerate(CASES)}
    predicted = {case: max(accuracy.predict(words[case], case.ranks).values()) for case in CASES}
    measured = accuracy.measure(CASES, words, folder)
    yield {case: (predicted[case], measured[case]) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_predicted_peak_is_the_measured_one(
    case: Case, peaks: dict[Case, tuple[int, list[int] | str]]
) -> None:
    predicted, measured = peaks[case]
    assert isinstance(measured, list), measured
    assert -0.02 <= predicted / max(measured) - 1 <= 0.04
