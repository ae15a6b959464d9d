"""From a strategy to the three files that make it: DeepSpeed JSON, partition YAML, batch script."""

import copy
import itertools
import json
import shlex
from pathlib import Path
from typing import Any

from launcher.config.generate import CONFIGS
from launcher.memory.strategy import Strategy, ZeroOptions
from launcher.slurm import SlurmJob, render
from models.names import is_repeated

_OFFLOAD = {"device": "cpu", "pin_memory": True}
_STAGES: dict[str, dict[str, Any]] = {
    "0": CONFIGS["fp32"]["zero_optimization"],
    "1": CONFIGS["fp16_ckpt_zero1"]["zero_optimization"],
    "2": CONFIGS["fp16_ckpt_zero2"]["zero_optimization"],
    "3": CONFIGS["fp16_ckpt_zero3"]["zero_optimization"],
}
ZERO_SECTIONS: dict[str, dict[str, Any]] = {
    **_STAGES,
    "1+offload": _STAGES["1"] | {"offload_optimizer": _OFFLOAD},
    "2+offload": _STAGES["2"] | {"offload_optimizer": _OFFLOAD},
    "3+offload": _STAGES["3"] | {"offload_optimizer": _OFFLOAD},
    "3+offload all": _STAGES["3"] | {"offload_optimizer": _OFFLOAD, "offload_param": _OFFLOAD},
}
"""The ``zero_optimization`` sections that are searched, by name; those of ds_configs/, with and without offload."""

_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": CONFIGS["bf16"]["bf16"]},
    "fp16": {"fp16": CONFIGS["fp16"]["fp16"]},
    "autocast-fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "autocast-bf16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def zero_options(name: str) -> ZeroOptions:
    """What a section of ``ZERO_SECTIONS`` means, with DeepSpeed's defaults (tested against its own reading)."""
    section = ZERO_SECTIONS[name]
    renamed = {
        "reduce_bucket_size": "reduce_bucket_size",
        "allgather_bucket_size": "allgather_bucket_size",
        "stage3_prefetch_bucket_size": "prefetch_bucket_size",
        "stage3_param_persistence_threshold": "persistence_threshold",
    }
    return ZeroOptions(
        stage=section["stage"],
        overlap_comm=section["stage"] == 3,
        offload_optimizer="offload_optimizer" in section,
        offload_param="offload_param" in section,
        **{field: section[key] for key, field in renamed.items() if key in section},
    )


def zero_name(options: ZeroOptions) -> str:
    """Name of the section that these options come from."""
    offload = " all" if options.offload_param else ""
    return str(options.stage) + (f"+offload{offload}" if options.offload_optimizer else "")


def config_of(strategy: Strategy) -> dict[str, Any]:
    """The DeepSpeed JSON, in the style of ds_configs/."""
    config = copy.deepcopy(CONFIGS["fp32"]) | copy.deepcopy(_PRECISIONS[strategy.precision])
    config["train_batch_size"] = strategy.global_batch_size
    config["train_micro_batch_size_per_gpu"] = strategy.micro_batch_size
    config["gradient_clipping"] = strategy.gradient_clipping
    config["zero_optimization"] = copy.deepcopy(ZERO_SECTIONS[zero_name(strategy.zero)])
    if strategy.recompute == {name for name in strategy.layers if is_repeated(name)}:
        config["activation_checkpointing"] = copy.deepcopy(CONFIGS["fp16_ckpt"]["activation_checkpointing"])
    return config


def write_plan(
    strategy: Strategy, folder: Path, *, model: str, nodes: int, per_node: int, command: str
) -> list[Path]:
    """Write config.json, partition.yaml and job.sbatch; gives the files."""
    from models.partition import PartitionSpec, StageSpec

    names, bounds = strategy.layers, strategy.stage_bounds
    stages = tuple(
        StageSpec(name=f"stage-{index}", layers=patterns(names, names[first:end]), device=index)
        for index, (first, end) in enumerate(itertools.pairwise(bounds))
    )
    partition = PartitionSpec(
        model=strategy.spec.name,
        chunks=strategy.chunks,
        stages=stages,
        recompute=patterns(names, [name for name in names if name in strategy.recompute]),
    )
    folder.mkdir(parents=True, exist_ok=True)
    config, split, script = (folder / name for name in ("config.json", "partition.yaml", "job.sbatch"))
    config.write_text(json.dumps(config_of(strategy), indent=2) + "\n")
    partition.save(split, made_by=command)
    on_gpus = strategy.device_type == "cuda"
    train = [f"--config={config}", f"--model={model}", f"--partition={split}"]
    if strategy.stages > 1:
        train.append(f"--pipeline={strategy.engine}")
    job = SlurmJob(
        name=f"{strategy.spec.name}-{nodes}x{per_node}",
        nodes=nodes,
        tasks_per_node=strategy.world_size // nodes,
        gpus_per_node=per_node if on_gpus else 0,
        time="24:00:00",
        cpus_per_task=8 if on_gpus else 1,
        train=tuple(train),
        output=f"runs/{strategy.spec.name}-{nodes}x{per_node}",
    )
    script.write_text(render(job, command=command))
    return [config, split, script]


def train_command(folder: Path, model: str, strategy: Strategy) -> str:
    """The command that trains this plan on one node."""
    words = ["vlfit", "launch", f"--config={folder / 'config.json'}", f"--model={model}"]
    words.append(f"--partition={folder / 'partition.yaml'}")
    return shlex.join([*words, *([f"--pipeline={strategy.engine}"] if strategy.stages > 1 else [])])


def patterns(names: list[str], chosen: list[str]) -> tuple[str, ...]:
    """Shell patterns of the chosen layers: ``fusion.layer.*`` where all of a stack are among them."""
    found: dict[str, None] = {}
    for name in chosen:
        stem = name.rpartition(".")[0] if is_repeated(name) else ""
        stack = [other for other in names if stem and other.rpartition(".")[0] == stem and is_repeated(other)]
        whole = len(stack) > 1 and set(stack) <= set(chosen)
        found[f"{stem}.*" if whole else name] = None
    return tuple(found)
