"""A run's plan: the files that were given, read, checked against each other and resolved for this world."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config import load_config
from launcher.config.device import DeviceSupport
from launcher.config.training import TrainingConfig
from models.build import is_frozen, layer_names
from models.errors import UserError
from models.names import is_repeated, select
from models.spec import ModelSpec, load_spec

if TYPE_CHECKING:
    from models.partition import PartitionSpec

DEFAULT_MODEL = "demo"


@dataclass(frozen=True)
class TrainPlan:
    """What this run trains, how, and from which files."""

    spec: ModelSpec
    config: TrainingConfig
    partition: "PartitionSpec | None"
    pipeline: str
    """``zero``, ``fairscale`` or ``deepspeed``."""
    recompute: tuple[str, ...]
    """Names of the layers that are recomputed."""
    files: dict[str, str]
    """File name → content, as they are copied into the run directory."""
    steps: int
    notes: tuple[str, ...] = ()
    """One line each on what the pipeline changes; to be printed once."""

    @property
    def stages(self) -> int:
        """Pipeline stages; 1 means no pipeline."""
        return len(self.partition.stages) if self.partition else 1

    @property
    def fingerprint(self) -> str:
        """Hash of everything that a run directory belongs to."""
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()


def make_plan(
    *,
    config: str,
    model: str | None,
    partition: str | None,
    pipeline: str | None,
    steps: int | None,
    epochs: int | None,
    samples: int,
    world_size: int,
    device: DeviceSupport,
) -> TrainPlan:
    """Read and resolve the plan files. Raises UserError where they are wrong or contradict each other."""
    parsed = load_config(config)
    spec = load_spec(model or DEFAULT_MODEL)
    names = layer_names(spec)
    split = _load_split(partition, names, spec.name) if partition else None
    stages = len(split.stages) if split else 1
    if pipeline and stages == 1:
        raise UserError(f"--pipeline {pipeline} needs a --partition with two stages or more")
    engine = (pipeline or "fairscale") if stages > 1 else "zero"
    data_world = _replicas(engine, stages, world_size, partition)
    resolved = parsed.resolve(world_size=data_world, device=device)
    total = steps or _steps_of(resolved, samples, epochs)
    resolved = parsed.resolve(world_size=data_world, device=device, total_steps=total)
    if stages > 1 and resolved.zero_stage > 1:
        raise UserError(
            f"{config}: zero_optimization.stage {resolved.zero_stage} cannot be combined with the {stages} stages "
            f"of {partition}; use stage 0 or 1"
        )
    notes: list[str] = []
    if split is not None and engine == "deepspeed":
        _refuse_frozen_stages(split, spec, names, partition)
    if split is not None and stages > 1:
        notes = _check_chunks(engine, split.chunks, resolved, spec, partition)
    if split is not None:
        recompute = select(names, split.recompute) if split.recompute else []
    else:
        recompute = [name for name in names if is_repeated(name)] if resolved.recompute else []
    files = {"config.json": Path(config).read_text(), "model.yaml": spec.dump_yaml()}
    if partition:
        files["partition.yaml"] = Path(partition).read_text()
    return TrainPlan(spec, resolved, split, engine, tuple(recompute), files, total, tuple(notes))


def _replicas(engine: str, stages: int, world_size: int, partition: str | None) -> int:
    """Data-parallel ranks: all, but for DeepSpeed's pipeline, which has a process for each stage.

                   one process drives    of 4 processes and 2 stages
    zero           the whole model       4
    fairscale      all stages            4
    deepspeed      one stage             2
    """
    if engine != "deepspeed":
        return world_size
    if world_size % stages:
        raise UserError(
            f"{partition}: DeepSpeed's pipeline needs a process for each of the {stages} stages, and "
            f"{world_size} processes are no multiple of that; start {stages} for each replica"
        )
    return world_size // stages


def _check_chunks(
    engine: str, chunks: int, config: TrainingConfig, spec: ModelSpec, partition: str | None
) -> list[str]:
    """Give what is to be said about chunks. Raises UserError where DeepSpeed cannot cut a micro-batch."""
    rows = config.micro_batch_size
    if engine == "deepspeed" and rows % chunks:
        raise UserError(
            f"{partition}: {chunks} chunks do not divide the {rows} rows of a micro-batch ({config.path}: "
            "train_micro_batch_size_per_gpu); change one of them"
        )
    notes = []
    group, cut = spec.group, -(-rows // chunks)
    if chunks > 1 and cut % group:
        notes.append(
            f"chunks of {cut} rows cut the ITM groups of {group}: rows find fewer negatives than without pipeline"
        )
    if engine == "deepspeed" and spec.objectives.itc and chunks > 1:
        notes.append(
            f"ITC compares the {cut} rows of a chunk (× {config.world_size} replicas) with each other, not the "
            f"{rows} of a micro-batch: the last stage of DeepSpeed's pipeline computes the loss"
        )
    return notes


def _load_split(path: str, names: list[str], model: str) -> "PartitionSpec":
    # FairScale's import takes a second that a run without partition need not spend.
    from models.partition import load_partition

    split = load_partition(path)
    try:
        split.validate_against(names, model)
    except UserError as error:
        raise UserError(f"{path}: {str(error).removeprefix('partition: ')}") from None
    return split


def _refuse_frozen_stages(
    split: "PartitionSpec", spec: ModelSpec, names: list[str], path: str | None
) -> None:
    """DeepSpeed cannot make an optimizer for a stage that trains nothing."""
    for stage, layers in zip(split.stages, split.stage_layers(names), strict=True):
        if all(is_frozen(spec, name) for name in layers):
            raise UserError(
                f"{path}: stage '{stage.name}' ('{layers[0]}' to '{layers[-1]}') is all frozen; in DeepSpeed's "
                "pipeline every stage trains something: add a trainable layer, or use --pipeline fairscale"
            )


def _steps_of(config: TrainingConfig, samples: int, epochs: int | None) -> int:
    """Without --steps: --epochs, else the schedule's own length, else one pass over the data."""
    scheduled = config.scheduler.params.get("total_num_steps") if config.scheduler else None
    if epochs is None and scheduled:
        return int(scheduled)
    return max(1, (epochs or 1) * samples // config.global_batch_size)
