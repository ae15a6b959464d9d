"""The meter of measured memory, against sizes that are known."""

import threading

import pytest
import torch

from launcher.memory.measure import MemoryMeter

MIB = 2**20


@pytest.fixture
def meter() -> MemoryMeter:
    meter = MemoryMeter(torch.device("cpu"))
    meter.start()
    return meter


def test_counts_what_lives_and_remembers_the_most(meter: MemoryMeter) -> None:
    kept = torch.ones(MIB // 4)
    gone = torch.ones(3 * MIB // 4)
    del gone
    more = torch.ones(MIB // 4)
    assert meter.current_bytes() == {"cpu": 2 * MIB}
    assert meter.peak_bytes() == {"cpu": 4 * MIB}
    del kept, more
    assert meter.current_bytes() == {"cpu": 0}


def test_counts_every_thread_and_the_backward_pass(meter: MemoryMeter) -> None:
    kept: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: kept.append(torch.ones(MIB // 4)))
    thread.start()
    thread.join()
    assert meter.current_bytes() == {"cpu": MIB}
    leaf = torch.ones(MIB // 4, requires_grad=True)
    (leaf * 2).sum().backward()
    assert meter.current_bytes() == {"cpu": 3 * MIB}
    assert meter.peak_bytes()["cpu"] >= 3 * MIB


def test_storage_grown_in_place_is_counted(meter: MemoryMeter) -> None:
    tensor = torch.empty(0)
    tensor.resize_(MIB // 4)
    assert meter.current_bytes() == {"cpu": MIB}


def test_tensors_from_before_the_meter_are_left_out() -> None:
    before = torch.ones(MIB)
    meter = MemoryMeter(torch.device("cpu"))
    meter.start()
    assert meter.current_bytes() == {"cpu": 0}
    del before
    after = torch.ones(MIB // 4)
    assert meter.peak_bytes()["cpu"] <= MIB and len(after) == MIB // 4
