"""Loaders: the same batches from any number of workers and ranks, also across a kill; real processes."""

import itertools
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from data_makers import write_folder

from launcher.data.batches import FixedBatches, Plan
from launcher.data.loader import Loader, RawBatch, check_shared_memory
from launcher.data.memory_batches import MemoryBatches
from launcher.data.order import DataPosition
from launcher.data.pack import pack
from launcher.data.store import Store
from models.errors import UserError

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["launcher.data.loader"])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loader")
    write_folder(root / "source", 50, captions=2)
    pack(root / "source", root / "store", image_size=16, max_length=16)
    return root / "store"


def cost(rows: int, tokens: int) -> int:
    return rows * tokens


def make_plan(kind: str, store: Store) -> Plan:
    if kind == "fixed":
        return FixedBatches(len(store), micro_batch=3, batches_per_step=4, length=12)
    return MemoryBatches(store.lengths, batches_per_step=4, budget_bytes=60, cost=cost)


def take(loader: Loader | Iterator[RawBatch], count: int) -> list[RawBatch]:
    return list(itertools.islice(loader, count))


def test_a_batch_holds_what_the_store_holds(packed: Path) -> None:
    store = Store.open(packed)
    (batch,) = take(Loader(store, FixedBatches(len(store), 8, 1, length=10)), 1)
    assert batch.images.shape == (8, 3, 16, 16) and batch.images.dtype == torch.uint8
    assert batch.input_ids.shape == batch.attention_mask.shape == (8, 10)
    for row, sample_id in enumerate(batch.sample_ids.tolist()):
        sample = store[sample_id]
        assert np.array_equal(batch.images[row].numpy(), sample.image)
        ids = batch.input_ids[row][batch.attention_mask[row]].tolist()
        if len(sample.input_ids) <= 10:
            assert ids == sample.input_ids.tolist()
        else:  # cut to the length of training, and still closed by [SEP]
            assert ids == [*sample.input_ids[:9].tolist(), store.manifest.sep_id]
        assert (batch.input_ids[row][~batch.attention_mask[row]] == store.manifest.pad_id).all()
        assert batch.image_ids[row] == sample.image_id and batch.caption_ids[row] == sample.caption_id
    assert batch.weights.sum() == pytest.approx(1)


def test_without_a_length_batches_are_padded_to_their_longest_caption(packed: Path) -> None:
    store = Store.open(packed)
    for batch in take(Loader(store, FixedBatches(len(store), 4, 1)), 5):
        assert batch.input_ids.shape[1] == store.lengths[batch.sample_ids.numpy()].max()
        assert batch.attention_mask.sum(dim=1).tolist() == store.lengths[batch.sample_ids.numpy()].tolist()


@pytest.mark.parametrize("kind", ["fixed", "memory"])
def test_workers_give_the_same_batches_in_the_same_order(kind: str, packed: Path) -> None:
    store = Store.open(packed)
    expected = take(Loader(store, make_plan(kind, store)), 30)
    for workers in (1, 3):
        found = take(Loader(store, make_plan(kind, store), workers=workers), 30)
        assert all(
            torch.equal(ours, theirs)
            for one, other in zip(expected, found, strict=True)
            for ours, theirs in zip(one, other, strict=True)
        )


def train(
    store: Path,
    kind: str,
    rank: int,
    world_size: int,
    workers: int,
    start: str,
    stop_after: int,
    out: str,
) -> None:
    """A rank: notes its samples and its position at every step, and is killed after ``stop_after``."""
    opened = Store.open(store)
    plan = make_plan(kind, opened)
    position = DataPosition.from_json(start)
    batches = iter(Loader(opened, plan, rank=rank, world_size=world_size, workers=workers, start=position))
    with open(f"{out}-{rank}.jsonl", "w") as file:
        for _ in range(stop_after):
            samples = [next(batches).sample_ids.tolist() for _ in range(4 // world_size)]
            position = plan.after(position)
            file.write(json.dumps({"samples": samples, "position": position.to_json()}) + "\n")
            file.flush()
    os.kill(os.getpid(), signal.SIGKILL)  # with batches prefetched that nobody has used


def run_ranks(
    store: Path, kind: str, world_size: int, workers: int, start: DataPosition, steps: int, out: Path
) -> tuple[list[list[int]], DataPosition]:
    """Run all ranks for some steps; gives each step's sample ids, and the saved position."""
    ranks = [
        CONTEXT.Process(
            target=train,
            args=(store, kind, rank, world_size, workers, start.to_json(), steps, str(out)),
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    lines = [
        [json.loads(line) for line in Path(f"{out}-{rank}.jsonl").read_text().splitlines()]
        for rank in range(world_size)
    ]
    samples = [
        [sample for rank in step for batch in rank["samples"] for sample in batch]
        for step in zip(*lines, strict=True)
    ]
    positions = {rank[-1]["position"] for rank in lines}
    assert len(positions) == 1
    return samples, DataPosition.from_json(positions.pop())


@pytest.mark.parametrize("kind", ["fixed", "memory"])
def test_killed_and_resumed_with_other_workers_and_ranks_the_epoch_is_the_same(
    kind: str, packed: Path, tmp_path: Path
) -> None:
    start = DataPosition(seed=3)
    whole, _ = run_ranks(packed, kind, 1, 2, start, 12, tmp_path / "whole")
    parts, position = [], start
    for number, (world_size, workers, steps) in enumerate([(2, 0, 3), (1, 3, 2), (4, 0, 5), (2, 1, 2)]):
        part, position = run_ranks(packed, kind, world_size, workers, position, steps, tmp_path / str(number))
        parts += part
    assert parts == whole
    epoch = [sample for step in whole for sample in step][:100]
    assert kind == "memory" or sorted(epoch) == list(range(100))


def test_workers_leave_signals_to_the_rank_and_end_with_it(packed: Path) -> None:
    store = Store.open(packed)
    batches = iter(Loader(store, FixedBatches(len(store), 2, 1), workers=2))
    take(batches, 4)  # two of each worker: from here on both are ready
    workers = [
        process
        for process in psutil.Process().children(recursive=True)
        if any("forkserver" in word for word in process.cmdline()) and process.ppid() != os.getpid()
    ]
    assert len(workers) >= 2
    for process in workers:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(number)
    time.sleep(0.2)
    assert len(take(batches, 20)) == 20
    assert all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in workers)
    del batches
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def test_workers_of_a_killed_rank_end(packed: Path) -> None:
    program = f"""
import time
from launcher.data.batches import FixedBatches
from launcher.data.loader import Loader
from launcher.data.store import Store
if __name__ == "__main__":
    batches = iter(Loader(Store.open({str(packed)!r}), FixedBatches(100, 4, 1), workers=2))
    next(batches)
    print("ready", flush=True)
    time.sleep(60)
"""
    script = packed.parent / "killed.py"
    script.write_text(program)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive


def test_a_worker_that_was_killed_does_not_keep_the_rank_from_ending(packed: Path) -> None:
    script = packed.parent / "lost_worker.py"
    script.write_text(f"""
import os, psutil, signal
from launcher.data.batches import FixedBatches
from launcher.data.loader import Loader
from launcher.data.store import Store
if __name__ == "__main__":
    batches = iter(Loader(Store.open({str(packed)!r}), FixedBatches(100, 4, 1), workers=2))
    next(batches)
    family = psutil.Process().children(recursive=True)
    worker = next(p for p in family if p.ppid() != os.getpid())
    worker.send_signal(signal.SIGKILL)
    for _ in batches:
        pass
""")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "UserError: a data worker was killed by SIGKILL (out of host memory?)" in ended.stderr


def test_the_loader_pickles_small(packed: Path) -> None:
    assert len(pickle.dumps(Loader(Store.open(packed), FixedBatches(100, 2, 1)).batches)) < 100_000


def test_too_little_shared_memory_is_told_before_the_run() -> None:
    with pytest.raises(UserError, match=r"MiB free, but 4 workers prefetch .* use fewer --workers"):
        check_shared_memory(4, 2**50)
    check_shared_memory(4, 1)


@pytest.mark.parametrize("ending", ["pass", "1 / 0"])
def test_a_program_that_ends_with_an_open_iterator_does_not_hang(ending: str, packed: Path) -> None:
    program = f"""
from launcher.data.batches import FixedBatches
from launcher.data.loader import Loader
from launcher.data.store import Store
if __name__ == "__main__":
    batches = iter(Loader(Store.open({str(packed)!r}), FixedBatches(100, 4, 1), workers=2))
    next(batches)
    {ending}
"""
    script = packed.parent / "program.py"
    script.write_text(program)
    run = subprocess.run([sys.executable, str(script)], timeout=30, stderr=subprocess.DEVNULL)
    assert run.returncode == (1 if ending == "1 / 0" else 0)


def test_importing_the_package_imports_no_torch() -> None:
    program = (
        "import launcher.data, launcher.data.store, launcher.data.order, launcher.data.pack, "
        "launcher.commands.data, launcher.data.memory_batches, launcher.data.cost; "
        "import sys; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
