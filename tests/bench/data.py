"""Measures the data layer beside its alternatives, on the same pictures, in one run.

    python tests/bench/data.py [--images 5000] [--work DIR] [--out data.json]

Prints a table and writes JSON. Needs ``webdataset`` besides vlfit's own requirements. The page cache is warm:
every reader's files are read once before it is timed.
"""

import argparse
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import psutil
import torch
from data_pictures import make_folder
from PIL import Image
from torch.utils.data import DataLoader

from launcher.data.batches import FixedBatches
from launcher.data.loader import Loader
from launcher.data.pack import pack
from launcher.data.store import Store

SIZE = 224
BATCH = 64
WORKERS = 2
RANKS, WORKERS_PER_RANK, EPOCHS = 2, 4, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=5_000)
    parser.add_argument("--work", type=Path, default=Path(".vlfit") / "bench-data")
    parser.add_argument("--out", type=Path, default=Path("data.json"))
    parser.add_argument("--rank", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*worker processes in total.*")
    if arguments.rank:
        iterate_as_rank(arguments.work / "store", *arguments.rank, arguments.workers)
        return
    torch.set_num_threads(1)
    results: dict[str, dict] = {"machine": {"cores": os.cpu_count(), "images": arguments.images}}
    folder = make_folder(arguments.work / "folder", arguments.images)
    for section in (packing, reading, host_memory, batching):
        results[section.__name__] = section(folder, arguments.work)
        show(section.__name__, results[section.__name__])
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def show(title: str, rows: dict[str, object]) -> None:
    print(f"\n{title}")
    for name, value in rows.items():
        text = f"{value:,.2f}" if isinstance(value, float) else str(value)
        print(f"  {name:<66} {text:>12}", flush=True)


def rate(batches: Iterable[object], count: int) -> float:
    """Samples per second of an epoch in batches of BATCH; starting the workers is not timed."""
    iterator = iter(batches)
    next(iterator)
    number = count // BATCH - 1
    start = time.perf_counter()
    for _ in itertools.islice(iterator, number):
        pass
    return number * BATCH / (time.perf_counter() - start)


def packing(folder: Path, work: Path) -> dict[str, object]:
    """Packing beside Pillow's decode and resize, per core."""
    files = sorted((folder / "all").iterdir())
    for file in files:
        file.read_bytes()

    def plain(draft: bool) -> float:
        some = files[:800]
        start = time.perf_counter()
        for file in some:
            image = Image.open(file)
            if draft:
                image.draft("RGB", (SIZE, SIZE))
            image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        return len(some) / (time.perf_counter() - start)

    rows: dict[str, object] = {
        "plain PIL decode and resize, one core, images/s": plain(False),
        "the same with reduced-scale decoding, one core": plain(True),
    }
    for workers in (0, 1, 2):
        shutil.rmtree(work / "store", ignore_errors=True)
        start = time.perf_counter()
        pack(folder, work / "store", image_size=SIZE, workers=workers, max_length=64)
        rows[f"pack, workers={workers}, images/s (all of it, tokenizer training too)"] = len(files) / (
            time.perf_counter() - start
        )
    plain_rate, alone, two = (list(rows.values())[place] for place in (0, 2, 4))
    rows["pack in one process ÷ plain PIL (wanted: 0.9)"] = alone / plain_rate
    rows["pack with 2 workers on 2 cores, per core ÷ plain PIL (wanted: 0.9)"] = two / 2 / plain_rate
    return rows


def reading(folder: Path, work: Path) -> dict[str, object]:
    """Samples per second of the store and of its alternatives."""
    store = Store.open(work / "store")
    count = len(store)
    plan = FixedBatches(count, BATCH, 1, length=64)
    tar, parquet, small_tar, small_parquet = alternatives(folder, work)
    copies, alone = [], []
    for _ in range(4):  # in turn, so that a busy machine slows both; the first turn maps the pages
        copies.append(copy_rate(store))
        alone.append(rate(Loader(store, plan), count))
    rates: dict[str, float] = {"plain copy of the same bytes": max(copies), "store, workers=0": max(alone)}
    loader = Loader(store, plan, workers=WORKERS)
    rates[f"store, workers={WORKERS}"] = max(rate(loader, count) for _ in range(2))
    readers: dict[str, Callable[[], Iterable[object]]] = {
        "torchvision ImageFolder + PIL": lambda: image_folder(folder),
        "datasets (Parquet)": lambda: hugging_face(parquet, work),
        "webdataset": lambda: web_dataset(tar),
        "datasets (Parquet), pictures resized before": lambda: hugging_face(small_parquet, work),
        "webdataset, pictures resized before": lambda: web_dataset(small_tar),
    }
    for name, reader in readers.items():
        rates[f"{name}, workers={WORKERS}"] = rate(reader(), count)
    rows: dict[str, object] = {f"{name}, samples/s": value for name, value in rates.items()}
    best, copy = (
        max(rates["store, workers=0"], rates[f"store, workers={WORKERS}"]),
        rates["plain copy of the same bytes"],
    )
    others = [value for name, value in rates.items() if name.startswith(("datasets", "webdataset"))]
    folder_rate = rates[f"torchvision ImageFolder + PIL, workers={WORKERS}"]
    rows["store ÷ ImageFolder (wanted: 20)"] = best / folder_rate
    rows[f"store with workers={WORKERS} ÷ ImageFolder"] = rates[f"store, workers={WORKERS}"] / folder_rate
    rows["store ÷ fastest of datasets and webdataset (wanted: 3)"] = best / max(others)
    rows["store ÷ plain copy (wanted: 0.6)"] = best / copy
    return rows


def copy_rate(store: Store) -> float:
    """Copy every shard front to back through one buffer of a batch."""
    buffer = np.empty((BATCH, 3, SIZE, SIZE), dtype=np.uint8)
    shards = [np.load(store.path / name, mmap_mode="r") for name in store.manifest.image_shards]
    start = time.perf_counter()
    rows = 0
    for shard in shards:
        for first in range(0, len(shard) - BATCH + 1, BATCH):
            np.copyto(buffer, shard[first : first + BATCH])
            rows += BATCH
    return rows / (time.perf_counter() - start)


def alternatives(folder: Path, work: Path) -> tuple[Path, Path, Path, Path]:
    """Write the same pictures as tar and Parquet, as they are and resized."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    made = []
    for resized in (False, True):
        tar_path, parquet_path = (
            work / f"{'small' if resized else 'large'}.{form}" for form in ("tar", "parquet")
        )
        made += [tar_path, parquet_path]
        if tar_path.is_file() and parquet_path.is_file():
            continue
        records = []
        with tarfile.open(tar_path, "w") as tar:
            for number, row in enumerate(rows):
                data = (folder / row["file_name"]).read_bytes()
                if resized:
                    buffer = io.BytesIO()
                    Image.open(io.BytesIO(data)).resize((SIZE, SIZE)).save(buffer, "JPEG", quality=95)
                    data = buffer.getvalue()
                for ending, content in (("jpg", data), ("txt", row["caption"].encode())):
                    member = tarfile.TarInfo(f"{number:06}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                records.append({"image": {"bytes": data, "path": None}, "caption": row["caption"]})
        pq.write_table(pa.Table.from_pylist(records), parquet_path, row_group_size=100)
    return made[0], made[1], made[2], made[3]


def to_tensor(image: Image.Image) -> torch.Tensor:
    """What ImageFolder users do: resize, then CHW uint8 (normalisation is left to the GPU for all alike)."""
    image = image.convert("RGB")
    if image.size != (SIZE, SIZE):
        image = image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def image_folder(folder: Path) -> Iterable[object]:
    from torchvision.datasets import ImageFolder

    pictures = ImageFolder(str(folder), transform=to_tensor)
    return DataLoader(pictures, BATCH, shuffle=True, num_workers=WORKERS)


def _transform(rows: dict) -> dict:
    return {"image": [to_tensor(image) for image in rows["image"]], "caption": rows["caption"]}


def hugging_face(parquet: Path, work: Path) -> Iterable[object]:
    import datasets

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_parquet(str(parquet), cache_dir=str(work / "datasets-cache"))
    table = table.cast_column("image", datasets.Image()).with_transform(_transform)
    return DataLoader(table, BATCH, shuffle=True, num_workers=WORKERS)


def web_dataset(tar: Path) -> Iterable[object]:
    import webdataset

    samples = webdataset.WebDataset(
        [str(tar)] * WORKERS, shardshuffle=False, workersplitter=None, nodesplitter=None, empty_check=False
    )
    return DataLoader(
        samples.shuffle(500).decode("pil").to_tuple("jpg", "txt").map(_pair), BATCH, num_workers=WORKERS
    )


def _pair(pair: tuple[Image.Image, str]) -> tuple[torch.Tensor, str]:
    return to_tensor(pair[0]), pair[1]


def iterate_as_rank(path: Path, rank: int, world_size: int, workers: int) -> None:
    """A rank of the memory measurement: says when an epoch is over, and waits to be told to go on."""
    store = Store.open(path)
    plan = FixedBatches(len(store), 32, world_size, length=64)
    batches = iter(Loader(store, plan, rank=rank, world_size=world_size, workers=workers))
    for _ in range(EPOCHS):
        for _ in itertools.islice(batches, len(store) // 32 // world_size):
            pass
        print("epoch", flush=True)
        sys.stdin.readline()


def host_memory(folder: Path, work: Path) -> dict[str, object]:
    """Sum of the proportional set sizes of all worker processes (fork servers included), after each epoch."""
    one = worker_memory(work, ranks=1, workers=1)
    many = worker_memory(work, RANKS, WORKERS_PER_RANK)
    cache = Store.open(work / "store").manifest.total_bytes / 2**20
    rows: dict[str, object] = {
        "store in the page cache, MiB": cache,
        "1 rank × 1 worker, PSS with its fork server, MiB": one[-1]["total"],
        "  of that the worker itself": one[-1]["workers"],
        "  of that without the store": one[-1]["total"] - cache,
    }
    for epoch, measured in enumerate(many):
        rows[f"{RANKS} ranks × {WORKERS_PER_RANK} workers, after epoch {epoch}, MiB"] = measured["total"]
    total = many[-1]["total"]
    rows["sum ÷ (one worker's PSS + page cache) (wanted: 1.1)"] = total / (one[-1]["workers"] + cache)
    rows["sum ÷ all of 1 × 1, which has the store once (stricter)"] = total / one[-1]["total"]
    rows["growth over the epochs, MiB (wanted: none)"] = total - many[0]["total"]
    return rows


def worker_memory(work: Path, ranks: int, workers: int) -> list[dict[str, float]]:
    command = [sys.executable, __file__, "--work", str(work), "--workers", str(workers)]
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank), str(ranks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    measured = []
    for _ in range(EPOCHS):
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(0.5)
        total = alone = 0.0
        for process in processes:
            children = psutil.Process(process.pid).children(recursive=True)
            for child in children:
                used = child.memory_full_info().pss / 2**20
                total += used
                alone += used * (child.ppid() != process.pid)  # workers are children of the fork server
        measured.append({"total": total, "workers": alone})
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
    for process in processes:
        process.wait()
    return measured


def batching(folder: Path, work: Path) -> dict[str, object]:
    from data_batching import measure

    return measure(Store.open(work / "store"))


if __name__ == "__main__":
    main()
