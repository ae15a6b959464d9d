"""What the planner knows of devices: a closed file, achievable rates, and this host's CPU measured."""

from pathlib import Path

import pytest
import yaml

from launcher.memory import hardware
from launcher.memory.hardware import HardwareFile, find_hardware, hardware_file
from models.errors import UserError
from models.schema import validate

NAMES = {
    *("V100-16", "V100-32", "A100-40", "A100-80", "H100", "H200"),
    *("A10", "L4", "L40S", "RTX3090", "RTX4090", "T4"),
}


def test_the_file_holds_the_gpus_of_the_issue() -> None:
    assert set(hardware_file().gpus) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_cuda_gives_less_memory_than_the_card_is_sold_with(name: str) -> None:
    sold = {"A10": 24, "L4": 24, "L40S": 48, "RTX3090": 24, "RTX4090": 24, "T4": 16, "H100": 80, "H200": 141}
    sold |= {known: int(known.split("-")[1]) for known in NAMES if "-" in known}
    found = find_hardware(name.lower()).memory_bytes
    assert 0.88 * sold[name] * 2**30 < found <= sold[name] * 2**30


@pytest.mark.parametrize(
    ("name", "bf16"), [("V100-32", False), ("T4", False), ("A100-40", True), ("L4", True)]
)
def test_bf16_is_where_the_compute_capability_has_it(name: str, bf16: bool) -> None:
    found = find_hardware(name)
    assert found.support.bf16 is bf16
    assert found.support.fp16
    assert ("bf16" in found.precisions) is bf16
    if not bf16:
        with pytest.raises(UserError, match="use fp16"):
            found.flops("autocast-bf16")


def test_autocast_computes_at_the_rate_of_its_format() -> None:
    a100 = find_hardware("A100-40")
    assert a100.flops("autocast-bf16") == a100.flops("bf16") > a100.flops("fp32")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        find_hardware("K80")
    assert all(name in str(caught.value) for name in (*NAMES, "cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gib": -1.0}, "greater than 0"),
        ({"sources": {}}, "sources must name exactly the figures"),
        ({"colour": 1}, 'unknown key "gpus.T4.colour"'),
    ],
)
def test_the_schema_is_closed(change: dict, message: str) -> None:
    data = yaml.safe_load(hardware.FILE.read_text())
    data["gpus"]["T4"] |= change
    with pytest.raises(UserError, match=message):
        validate(data, HardwareFile, "hardware.yaml")


def test_the_cpu_is_measured_once_and_shared_by_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    alone = find_hardware("cpu")
    assert list((tmp_path / "vlfit" / "cpu").iterdir())
    shared = find_hardware("CPU", per_node=2)
    assert shared.flops("fp32") == alone.flops("fp32") / 2  # the same measurement, or the two would differ
    assert shared.memory_bytes == alone.memory_bytes // 2
    assert alone.flops("fp32") > 1e9
    assert alone.memory_bandwidth > 1e8
    assert not alone.support.fp16
