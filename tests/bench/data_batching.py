"""Batches by memory beside fixed, padded ones: samples per second and measured peak of real training steps.

The model has the proportions of BERT-base + ViT-B/16 at 224 pixels with six fusion layers, a quarter as wide
and half as deep, so that the bench runs on a CPU. The peak is counted from the allocator's own events.
"""

import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from launcher.data.batches import MicroBatch
from launcher.data.cost import ActivationCost, TransformerShape, budget_bytes
from launcher.data.loader import StoreBatches
from launcher.data.memory_batches import MemoryBatches
from launcher.data.order import DataPosition
from launcher.data.store import Store
from models import build_layers
from models.losses import Objectives
from models.spec import ModelSpec
from models.state import State

ROWS, LENGTH, GROUP = 16, 64, 4
SAMPLES = 192


def measure(store: Store) -> dict[str, object]:
    """Time both ways of batching and measure their peaks."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    step = training_step(store)
    cost = ActivationCost(
        TransformerShape(6, 192, 3), 197, TransformerShape(6, 192, 3), TransformerShape(3, 192, 3), pairs=2
    )
    plan = MemoryBatches(
        store.lengths,
        1,
        budget_bytes("auto", cost, ROWS, LENGTH),
        cost,
        max_length=LENGTH,
        rows_multiple=GROUP,
    )
    by_memory, position = [], DataPosition(seed=1)
    while position.epoch == 0:
        by_memory += plan.step(position)
        position = plan.after(position)
    random = np.random.default_rng(0).permutation(len(store))
    fixed = [fixed_batch(random[start : start + ROWS], LENGTH) for start in range(0, SAMPLES, ROWS)]
    longest = [fixed_batch(random[start : start + ROWS], None) for start in range(0, SAMPLES, ROWS)]
    extremes = [by_memory[0], min(by_memory, key=lambda batch: batch.length or 0)]
    extremes.append(max(by_memory, key=lambda batch: len(batch.rows)))
    peak_fixed = peak_bytes(lambda: step(fixed[0]))
    peak_memory = max(peak_bytes(lambda batch=batch: step(batch)) for batch in extremes)
    some, rows = [], 0
    for batch in by_memory[1:]:  # in random order after the first
        if rows < SAMPLES:
            some.append(batch)
            rows += len(batch.rows)
    names = ("fixed, padded to 64", "fixed, padded to the longest of the batch", "by memory")
    rates = dict(zip(names, rates_side_by_side(step, fixed, longest, some), strict=True))
    return {
        "tokens per caption, median": float(np.median(store.lengths)),
        "tokens per caption, longest": int(store.lengths.max()),
        "micro-batches of an epoch, fixed": len(store) // ROWS,
        "micro-batches of an epoch, by memory": len(by_memory),
        **{f"{name}, samples/s": value for name, value in rates.items()},
        "peak of fixed, MiB": peak_fixed / 2**20,
        "peak by memory (first, shortest, most rows), MiB": peak_memory / 2**20,
        "peak by memory ÷ peak of fixed (wanted: 1)": peak_memory / peak_fixed,
        "by memory ÷ fixed, padded to 64 (wanted: 1.3)": rates["by memory"] / rates["fixed, padded to 64"],
    }


def fixed_batch(samples: np.ndarray, length: int | None) -> MicroBatch:
    rows = np.arange(len(samples), dtype=np.int64)
    return MicroBatch(
        samples.astype(np.int64), rows, np.full(len(rows), 1 / len(rows), dtype=np.float32), length
    )


def training_step(store: Store) -> Callable[[MicroBatch], None]:
    """Forward, losses and backward of one micro-batch."""
    spec = ModelSpec.model_validate(
        {
            "name": "quarter",
            "image": {"timm": "vit_tiny_patch16_224", "size": 224, "depth": 6},
            "text": {
                "vocab_size": store.manifest.vocab_size,
                "width": 192,
                "layers": 6,
                "heads": 3,
                "feed_forward": 768,
                "positions": LENGTH,
                "length": LENGTH,
            },
            "fusion": {"layers": 3, "width": 192, "heads": 3, "feed_forward": 768},
            "objectives": {"itc": {"width": 64}, "itm": {"negatives": 1, "group": GROUP}, "mlm": {}},
        }
    )
    layers = nn.ModuleList(build_layers(spec))
    objectives = Objectives(spec)
    batches = StoreBatches(store)

    def step(batch: MicroBatch) -> None:
        raw = batches[batch]
        rows, length = raw.input_ids.shape
        index = torch.arange(rows)
        keys = torch.stack([raw.image_ids, raw.caption_ids, index // GROUP, index % GROUP], dim=1)
        positions = torch.randint(1, max(2, length - 1), (rows, spec.masked_positions))
        state = State(
            raw.images.float() / 255,
            raw.input_ids,
            torch.randint(0, 2**31 - 1, (rows, GROUP), dtype=torch.int32),
            raw.attention_mask,
            keys,
            positions,
        )
        out = tuple(state)
        for layer in layers:
            out = layer(out)
        labels = torch.gather(raw.input_ids, 1, positions)
        terms = objectives(out, (labels, keys[:, :2]))
        terms.total.backward()
        layers.zero_grad(set_to_none=True)

    return step


def rates_side_by_side(step: Callable[[MicroBatch], None], *ways: list[MicroBatch]) -> list[float]:
    """Samples per second of each way, a batch of each in turn, so that a busy machine slows all alike."""
    seconds, rows = [0.0] * len(ways), [0] * len(ways)
    step(ways[0][0])
    for turn in itertools.zip_longest(*ways):
        for way, batch in enumerate(turn):
            if batch is not None:
                start = time.perf_counter()
                step(batch)
                seconds[way] += time.perf_counter() - start
                rows[way] += len(batch.rows)
    return [number / taken for number, taken in zip(rows, seconds, strict=True)]


def peak_bytes(run: Callable[[], None]) -> int:
    """Highest sum of what the CPU allocator gave and took back while ``run`` ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(changes).max())
