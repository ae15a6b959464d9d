"""The batch scripts of ``slurm/``, written by ``vlfit submit --write`` and checked in."""

from pathlib import Path

from launcher.slurm import SlurmJob, render
from models.errors import UserError

DATA = "--data=data/train"
BASE = ("--model=bert_vit_base", DATA, "--save-every=500")
LARGE = ("--model=bert_vit_large", DATA, "--save-every=500")

EXAMPLES = {
    "1x1.sbatch": SlurmJob(
        name="base-1x1", nodes=1, tasks_per_node=1, gpus_per_node=1, cpus_per_task=8, time="24:00:00",
        train=("--config=ds_configs/fp16_ckpt.json", *BASE), output="runs/base-1x1",
    ),
    "1x8.sbatch": SlurmJob(
        name="base-1x8", nodes=1, tasks_per_node=8, gpus_per_node=8, cpus_per_task=8, time="24:00:00",
        train=("--config=ds_configs/bf16_ckpt.json", *BASE), output="runs/base-1x8",
    ),
    "2x8.sbatch": SlurmJob(
        name="large-2x8", nodes=2, tasks_per_node=8, gpus_per_node=8, cpus_per_task=8, time="24:00:00",
        train=("--config=ds_configs/fp16_ckpt_zero2.json", *LARGE), output="runs/large-2x8",
    ),
    "4x8.sbatch": SlurmJob(
        name="large-4x8", nodes=4, tasks_per_node=8, gpus_per_node=8, cpus_per_task=8, time="24:00:00",
        train=("--config=ds_configs/fp16_ckpt_zero3.json", *LARGE), output="runs/large-4x8",
    ),
    # two stages in each process: four processes drive the eight GPUs
    "1x8-partition.sbatch": SlurmJob(
        name="large-image-alone", nodes=1, tasks_per_node=4, gpus_per_node=8, cpus_per_task=16,
        time="24:00:00",
        train=(
            "--config=ds_configs/fp16_ckpt.json",
            LARGE[0],
            "--partition=models/partitions/bert_vit_large.image-alone.yaml",
            *LARGE[1:],
        ),
        output="runs/large-image-alone",
    ),
    "sweep.sbatch": SlurmJob(
        name="base-sweep", nodes=1, tasks_per_node=1, gpus_per_node=1, cpus_per_task=8, time="12:00:00",
        train=("--config=ds_configs/fp16_ckpt.json", *BASE), output="runs/base-sweep",
        sweep=(("--seed=1",), ("--seed=2",), ("--seed=3",), ("--seed=4",)), sweep_at_once=2,
    ),
}  # fmt: skip


def render_examples() -> dict[str, str]:
    """Text of every file, by name."""
    return {name: render(job, command="vlfit submit --write") for name, job in EXAMPLES.items()}


def write_examples(folder: str | Path, check: bool = False) -> int:
    """Write the files, or with ``check`` raise UserError where one differs."""
    folder = Path(folder)
    files = render_examples()
    if check:
        different = [
            name
            for name, text in files.items()
            if not (folder / name).exists() or (folder / name).read_text(encoding="utf-8") != text
        ]
        if different:
            raise UserError(f"{folder}: not as generated: {', '.join(different)}; run vlfit submit --write")
        print(f"{folder}: {len(files)} files are as generated")
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None
    print(f"{folder}: wrote {len(files)} files")
    return 0
