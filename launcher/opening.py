"""Opens a session: reads and checks the plan and the data, then builds the layers and the engine of one rank."""

import argparse
import contextlib
import time
from pathlib import Path

import torch
import torch.distributed as dist

from launcher import preflight
from launcher.agreement import from_rank_0
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
from launcher.forecast import forecast
from launcher.inputs import Inputs
from launcher.memory.measure import MemoryMeter
from launcher.plan import DEFAULT_MODEL, TrainPlan, make_plan
from launcher.process_group import start_process_group
from launcher.processes import gpus_per_process
from launcher.run_directory import RunDirectory
from launcher.session import Session
from launcher.signals import StopRequest
from models.build import build_layers
from models.errors import DataError, UserError
from models.layer import set_recompute
from models.losses import Objectives
from models.spec import load_spec

DEFAULT_MAX_SKIPPED = 10


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
    start, folder = from_rank_0((start, directory.path / "checkpoints" if directory else None))
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

    # Before the meter starts: tracing allocates as well.
    expected = None
    if speaks:
        expected = forecast(
            plan,
            distributed.world_size,
            "cuda" if device.type == "cuda" else "cpu",
            bool(arguments.batch_memory),
        )
    expected = from_rank_0(expected)
    if expected.prediction is None:
        console.say(f"note: no prediction of this run's memory: {expected.why_not}")
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
        forecast=expected,
        console=console,
        directory=directory,
        eval_every=arguments.eval_every,
        progress=progress,
        checkpoints=checkpoints,
        interval=Interval(arguments.save_every),
        save_required=arguments.save_required,
        max_skipped=arguments.max_skipped or DEFAULT_MAX_SKIPPED,
        stop=stop,
        resources=resources,
    )


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
