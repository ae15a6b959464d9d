"""A training session: everything that one rank holds while it trains, built once from the arguments."""

import argparse
import contextlib
import os
import signal
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher import preflight
from launcher.checkpoint import Checkpoints, Progress
from launcher.checkpoint.identity import identity
from launcher.checkpoint.interval import Interval
from launcher.checkpoint.resume import Start, choose_start
from launcher.config.device import DeviceSupport
from launcher.console import Console
from launcher.data.batches import FixedBatches, Plan
from launcher.data.cache import node_cache
from launcher.data.cost import ActivationCost, budget_bytes
from launcher.data.loader import Loader
from launcher.data.memory_batches import MemoryBatches
from launcher.data.order import DataPosition
from launcher.data.store import Store
from launcher.demo_data import demo_stores
from launcher.devices import claim_devices
from launcher.distributed import Distributed
from launcher.engines import build_engine
from launcher.engines.engine import Engine, MicroBatch, StepResult
from launcher.evaluate import evaluate
from launcher.inputs import Inputs
from launcher.memory.measure import MemoryMeter
from launcher.plan import DEFAULT_MODEL, TrainPlan, make_plan
from launcher.processes import gpus_per_process
from launcher.rendezvous import interface_towards
from launcher.run_directory import RunDirectory
from launcher.signals import StopRequest
from models.build import build_layers
from models.errors import EXIT_INTERRUPTED, DataError, UserError
from models.layer import set_recompute
from models.losses import Objectives
from models.spec import load_spec


@dataclass
class Session:
    """One rank's run. ``batches`` feeds the loop, ``record`` follows it, ``finish`` evaluates and sums up."""

    plan: TrainPlan
    distributed: Distributed
    device: torch.device
    engine: Engine
    loader: Loader
    data_plan: Plan
    inputs: Inputs
    eval_store: Store | None
    meter: MemoryMeter
    console: Console
    directory: RunDirectory | None
    eval_every: int | None
    progress: Progress
    checkpoints: Checkpoints
    interval: Interval
    save_required: bool
    stop: StopRequest
    resources: contextlib.ExitStack
    """What stays open while the run lasts: the node's copy of the data."""
    step_rows: int = 0
    samples_here: int = 0
    """Of this process, not of those that it goes on from."""
    exit_code: int = 0
    results: list[StepResult] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    evaluations: dict[str, float] = field(default_factory=dict)
    _mark: float = field(default_factory=time.perf_counter)

    @property
    def finished(self) -> bool:
        """All optimizer steps are done."""
        return self.progress.step >= self.plan.steps

    def batches(self) -> Iterator[Sequence[MicroBatch]]:
        """Give the micro-batches of this rank, one optimizer step at a time."""
        stream = iter(self.loader)
        count = len(
            self.data_plan.step(self.progress.position, self.engine.data_rank, self.engine.data_world)
        )
        while True:
            self._mark = time.perf_counter()
            raw = [next(stream) for _ in range(count)]
            # Every row of a step weighs the same, and the weights sum to 1 over all ranks.
            self.step_rows = round(1 / float(raw[0].weights[0]))
            yield [self.inputs(batch) for batch in raw]

    def record(self, result: StepResult) -> None:
        """Count a step: metrics, progress, evaluation where it is due."""
        progress = self.progress
        progress.step += 1
        progress.position = self.data_plan.after(progress.position)
        progress.loss_first = result.loss if progress.loss_first is None else progress.loss_first
        progress.loss_last = result.loss
        progress.skipped_steps += result.overflow
        seconds = time.perf_counter() - self._mark
        self.step_seconds.append(seconds)
        self.results.append(result)
        progress.samples += self.step_rows
        self.samples_here += self.step_rows
        rate = self.step_rows / seconds
        if self.directory is not None:
            self.directory.write_step(
                {
                    "step": progress.step,
                    "epoch": progress.position.epoch,
                    "loss": result.loss,
                    "losses": result.losses,
                    "skipped_rows": result.skipped_rows,
                    "lr": result.lr,
                    "grad_norm": result.grad_norm,
                    "loss_scale": result.loss_scale,
                    "overflow": result.overflow,
                    "samples": progress.samples,
                    "samples_per_second": rate,
                    "step_seconds": seconds,
                    "peak_allocated_bytes": self.meter.peak_bytes(),
                }
            )
        self.console.step(progress.step, result, rate)
        if self.eval_every and progress.step % self.eval_every == 0 and not self.finished:
            self._evaluate()
        self._save_where_due()

    def _save_where_due(self) -> None:
        """Save at the interval, and on a signal to any rank; then the run is to end."""
        signal_number, due = _largest_of_all_ranks(
            self.device,
            int(self.stop.received or 0),
            int(self.distributed.rank == 0 and self.interval.due(self.progress.step)),
        )
        if signal_number and not self.finished:
            self.console.say(f"{signal.Signals(signal_number).name}: saving after step {self.progress.step}")
            self.save(required=True)
            self.exit_code = EXIT_INTERRUPTED
        elif due and not self.finished:
            self.save(required=self.save_required)

    def save(self, required: bool) -> None:
        """Write a checkpoint. What is not ``required`` may fail with a warning: the last good one stays."""
        try:
            path = self.checkpoints.save(self.progress)
        except OSError as error:
            problem = f"no checkpoint after step {self.progress.step}: {error}"
            if required:
                raise UserError(f"{problem}; free space below {self.checkpoints.folder}") from None
            self.console.say(f"warning: {problem}; the last good one stays")
        else:
            self.console.say(f"saved {path}")
        self.interval.saved()
        self._mark = time.perf_counter()

    def finish(self, seconds: float) -> None:
        """Evaluate, and write and print the summary."""
        peaks = self.meter.stop()
        if self.eval_store is not None:
            self._evaluate()
        if self.interval.ever and self.results:
            self.save(required=self.save_required)
        summary = self.summary(_gather(peaks), seconds)
        if self.directory is not None:
            self.directory.write_summary(summary)
            self.console.close()
            for line in _closing_lines(summary, self.directory.path):
                self.console.say(line)

    def summary(self, peaks: list[dict[str, int]], seconds: float) -> dict[str, Any]:
        """Give ``summary.json`` as the design lists it."""
        config = self.plan.config
        # The first steps compile, allocate and warm caches up.
        steady = self.step_seconds[min(2, len(self.step_seconds) - 1) :] or [0.0]
        seconds_here = sum(self.step_seconds)
        return {
            "steps": self.progress.step,
            "epoch": self.progress.position.epoch,
            "loss_first": self.progress.loss_first,
            "loss_last": self.progress.loss_last,
            "samples": self.progress.samples,
            "samples_per_second": self.samples_here / seconds_here if seconds_here else 0.0,
            "step_seconds_median": statistics.median(steady),
            "training_seconds": seconds,
            "peak_allocated_bytes": _largest(peaks),
            "peak_allocated_bytes_by_rank": peaks,
            "peak_reserved_bytes": self.meter.reserved_bytes(),
            "peak_rss_bytes": self.meter.rss_bytes(),
            "predicted_peak_bytes": None,
            "precision_requested": config.precision_requested,
            "precision_used": config.precision_used,
            "recomputed_layers": len(self.plan.recompute),
            "engine": self.engine.name,
            "chunks": self.engine.chunks,
            "world_size": self.distributed.world_size,
            "skipped_rows": _sum_counts([result.skipped_rows for result in self.results]),
            "skipped_steps": self.progress.skipped_steps,
            "metrics": self.evaluations,
            "versions": versions(),
        }

    def close(self) -> None:
        """End workers, threads and process groups; safe after a failure."""
        self.console.close()
        if self.directory is not None:
            self.directory.close()
        self.engine.close()
        self.resources.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _evaluate(self) -> None:
        if self.eval_store is None:
            return
        rows = self.plan.config.micro_batch_size
        self.evaluations = evaluate(
            self.engine, Objectives(self.plan.spec), self.eval_store, self.inputs, rows
        )
        self._mark = time.perf_counter()
        self.console.say(_evaluation_line(self.progress.step, self.evaluations))


def open_session(arguments: argparse.Namespace, distributed: Distributed, stop: StopRequest) -> Session:
    """Read and check everything before the expensive parts start. Raises UserError and DataError."""
    seed = arguments.seed or 0
    devices = claim_devices(arguments.device, distributed, gpus_per_process(arguments))
    device = devices[0]
    stores = _stores(arguments)
    resources = contextlib.ExitStack()
    train_store, cache_message = stores / "train" if (stores / "train").is_dir() else stores, None
    if arguments.cache == "node":
        cached = resources.enter_context(node_cache(train_store))
        train_store, cache_message = cached.path, cached.message
    store = Store.open(train_store)
    eval_store = None
    if (stores / "eval").is_dir() and not arguments.no_eval:
        eval_store = Store.open(stores / "eval")
    plan = make_plan(
        config=arguments.config,
        model=arguments.model,
        partition=arguments.partition,
        pipeline=arguments.pipeline,
        steps=arguments.steps,
        epochs=arguments.epochs,
        samples=len(store),
        world_size=distributed.world_size,
        device=DeviceSupport.detect(),
    )
    data_plan = _data_plan(plan, store, arguments.batch_memory)
    inputs = Inputs.create(plan.spec, store.manifest, seed, device, _batches_per_step(plan))
    speaks = distributed.rank == 0
    directory, start = None, Start()
    known = identity(plan, store.manifest.checksum, seed, arguments.batch_memory)
    if speaks:
        output = Path(arguments.output) if arguments.output else None
        start = choose_start(arguments.resume, output, known, arguments.allow_change)
        name = f"{plan.spec.name}.{plan.config.path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        directory = RunDirectory.create(output or Path("runs") / name, plan.files, start.step)
    console = Console(plan.steps, speaks)
    start_process_group(distributed, device)
    start, folder = _from_rank_0((start, directory.path / "checkpoints" if directory else None))
    _say_header(console, plan, distributed, device, store)
    for line in start.lines:
        console.say(line)
    if cache_message:
        console.say(cache_message)
    if distributed.world_size > 1:
        preflight.run(
            distributed,
            device=str(device),
            plan=plan.fingerprint,
            data=store.manifest.checksum,
            output=directory.path if directory else ".",
            say=console.say,
        )

    torch.manual_seed(seed + distributed.rank)
    meter = MemoryMeter(*dict.fromkeys(devices))
    meter.start()
    layers = build_layers(plan.spec, seed=seed)
    if plan.recompute:
        set_recompute(layers, plan.recompute)
    objectives = Objectives(plan.spec, dist.group.WORLD, equal_rows=arguments.batch_memory is None)
    engine = build_engine(layers, plan, objectives, distributed, devices)
    checkpoints = Checkpoints(folder, engine, distributed.rank, known, arguments.keep)
    progress = Progress(position=DataPosition(seed=seed))
    if start.path is not None:
        progress, notes = checkpoints.restore(start.path)
        for note in notes:
            console.say(f"note: {note}")
    loader = Loader(
        store,
        data_plan,
        rank=engine.data_rank,
        world_size=engine.data_world,
        workers=arguments.workers or 0,
        start=progress.position,
        pin_memory=device.type == "cuda",
    )
    return Session(
        plan=plan,
        distributed=distributed,
        device=device,
        engine=engine,
        loader=loader,
        data_plan=data_plan,
        inputs=inputs,
        eval_store=eval_store,
        meter=meter,
        console=console,
        directory=directory,
        eval_every=arguments.eval_every,
        progress=progress,
        checkpoints=checkpoints,
        interval=Interval(arguments.save_every),
        save_required=arguments.save_required,
        stop=stop,
        resources=resources,
    )


def start_process_group(distributed: Distributed, device: torch.device) -> None:
    """Initialise torch.distributed through DeepSpeed: NCCL on CUDA, gloo on CPU."""
    import deepspeed

    if distributed.world_size == 1 and not distributed.master_port:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= distributed.environment() | {"MASTER_PORT": str(port)}
    else:
        os.environ |= distributed.environment()
    if distributed.nodes > 1:
        interface = interface_towards(distributed.master_address)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if device.type == "cuda":
        # DeepSpeed takes it for the number of the GPU; a task of SLURM may see its own GPU only, as number 0.
        os.environ["LOCAL_RANK"] = str(device.index)
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def versions() -> dict[str, str]:
    """Give the versions of what computes."""
    from importlib.metadata import version

    names = ("vlfit", "torch", "deepspeed", "fairscale", "transformers", "timm")
    return {name: version(name) for name in names}


def _batches_per_step(plan: TrainPlan) -> int:
    return plan.config.global_batch_size // plan.config.micro_batch_size


def _data_plan(plan: TrainPlan, store: Store, batch_memory: str | None) -> Plan:
    """Micro-batches of a fixed number of rows, or as many rows as fit into ``--batch-memory``."""
    spec, rows = plan.spec, plan.config.micro_batch_size
    if batch_memory is None:
        return FixedBatches(len(store), rows, _batches_per_step(plan), spec.text.length)
    if plan.pipeline != "zero":
        raise UserError(
            "--batch-memory: the stages of a pipeline need micro-batches of one size; leave it out"
        )
    cost = ActivationCost.of(spec)
    budget = budget_bytes(batch_memory, cost, rows, spec.text.length)
    return MemoryBatches(
        store.lengths,
        _batches_per_step(plan),
        budget,
        cost,
        max_length=spec.text.length,
        rows_multiple=spec.group,
    )


def _stores(arguments: argparse.Namespace) -> Path:
    """``--data``: a store, or a folder with stores ``train`` and ``eval``; none: the demo's."""
    if arguments.data is None:
        return demo_stores(load_spec(arguments.model or DEFAULT_MODEL))
    path = Path(arguments.data)
    if not path.is_dir():
        raise DataError(f"--data {path}: no such folder; make a store with `vlfit data pack SOURCE {path}`")
    return path


def _say_header(
    console: Console, plan: TrainPlan, distributed: Distributed, device: torch.device, store: Store
) -> None:
    config = plan.config
    backend = dist.get_backend()
    for line in distributed.header(backend, str(device)):
        console.say(line)
    console.say(
        f"model {plan.spec.name}, {config.path.name}: {config.precision_used}, ZeRO {config.zero_stage}, "
        f"global batch {config.global_batch_size} = {config.micro_batch_size} rows × "
        f"{config.accumulation_steps} accumulation × {config.world_size} ranks"
    )
    console.say(f"recomputing {len(plan.recompute)} layers: {', '.join(plan.recompute) or 'none'}")
    console.say(f"{plan.steps} steps over {len(store)} samples")
    for note in (*config.notes, *plan.notes):
        console.say(f"note: {note}")


def _largest_of_all_ranks(device: torch.device, *numbers: int) -> list[int]:
    if dist.get_world_size() == 1:
        return list(numbers)
    agreed = torch.tensor(numbers, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return agreed.tolist()


def _from_rank_0(value: Any) -> Any:
    shared = [value]
    dist.broadcast_object_list(shared, 0)
    return shared[0]


def _gather(peaks: dict[str, int]) -> list[dict[str, int]]:
    """Peaks of all ranks, by rank."""
    everyone: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, peaks)
    return everyone


def _largest(everyone: list[dict[str, int]]) -> dict[str, int]:
    """The largest peak of each device. On the CPU every rank is a device of its own."""
    merged: dict[str, int] = {}
    for found in everyone:
        for device, value in found.items():
            merged[device] = max(merged.get(device, 0), value)
    return merged


def _sum_counts(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(count[name] for count in counts) for name in counts[0]} if counts else {}


def _evaluation_line(step: int, metrics: dict[str, float]) -> str:
    line = (
        f"evaluation after step {step}: loss {metrics['loss']:.3f} on {metrics['samples']} held-out samples"
    )
    if "image_to_text_r1" in metrics:
        chance = 100 / metrics["candidates"]
        line += (
            f"; R@1 image→text {metrics['image_to_text_r1']:.1f} %, text→image {metrics['text_to_image_r1']:.1f} %"
            f" (chance {chance:.2f} %)"
        )
    if "image_to_text_reranked_r1" in metrics:
        line += (
            f"; re-ranked by ITM {metrics['image_to_text_reranked_r1']:.1f} %, "
            f"{metrics['text_to_image_reranked_r1']:.1f} %"
        )
    return line


def _closing_lines(summary: dict[str, Any], path: Path) -> list[str]:
    peaks = ", ".join(
        f"{device} {value / 2**20:.0f} MiB" for device, value in summary["peak_allocated_bytes"].items()
    )
    return [
        f"loss {summary['loss_first']:.3f} → {summary['loss_last']:.3f} in {summary['steps']} steps, "
        f"{summary['samples_per_second']:.0f} samples/s, peak allocated {peaks}, "
        f"{summary['precision_used']}, {summary['recomputed_layers']} layers recomputed",
        f"results in {path}",
    ]
