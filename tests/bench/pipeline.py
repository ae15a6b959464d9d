"""What a pipeline saves per stage and what it costs: ``python tests/bench/pipeline.py [--model SPEC] [--chunks N]``.

Trains the same batches in one process and under DeepSpeed's 1F1B, where a stage is a process, so that a rank's
measured peak is its stage's. Speed is set against the bound of 1F1B and GPipe alike: of the time of one process
divided by the stages, the share chunks / (chunks + stages - 1) can be reached (Narayanan et al., 2021, section 2).
On the CPU both runs use one thread per process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="model spec: a file or a name of models/specs/")
    parser.add_argument("--data", help="data store; default: the demo's")
    parser.add_argument("--partition", help="default: the model's image-alone partition")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=32, help="rows of the global batch")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    name = options.partition or ROOT / "models" / "partitions" / f"{options.model}.image-alone.yaml"
    split = yaml.safe_load(Path(name).read_text()) | {"chunks": options.chunks}
    stages = len(split["stages"])
    with tempfile.TemporaryDirectory() as folder:
        config, partition = Path(folder) / "config.json", Path(folder) / "partition.yaml"
        optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
        settings = {"train_batch_size": options.rows, "optimizer": optimizer, "gradient_clipping": 1.0}
        partition.write_text(yaml.safe_dump(split))
        words = [f"--config={config}", f"--model={options.model}", f"--steps={options.steps}", "--no-eval"]
        words += [f"--data={options.data}"] if options.data else []
        # A stage holds a few chunks at a time, so it stands beside one process that accumulates them, too.
        config.write_text(json.dumps(settings | {"gradient_accumulation_steps": options.chunks}))
        chunked = train(1, [*words, f"--output={folder}/chunked"], Path(folder) / "chunked")
        config.write_text(json.dumps(settings))
        alone = train(1, [*words, f"--output={folder}/alone"], Path(folder) / "alone")
        piped = train(
            stages,
            [*words, f"--output={folder}/piped", f"--partition={partition}", "--pipeline=deepspeed"],
            Path(folder) / "piped",
        )
    whole = peak(alone["peak_allocated_bytes_by_rank"][0])
    print(f"{'':20}{'peak MiB':>10}{'of whole':>10}")
    rows = [
        ("unpartitioned", whole),
        ("the same, by chunk", peak(chunked["peak_allocated_bytes_by_rank"][0])),
    ]
    rows += [
        (stage["name"], peak(peaks))
        for stage, peaks in zip(split["stages"], piped["peak_allocated_bytes_by_rank"], strict=True)
    ]
    for name, found in rows:
        print(f"{name:20}{found / 2**20:10.1f}{found / whole:10.2f}")
    once, together = alone["step_seconds_median"], piped["step_seconds_median"]
    reached, bound = once / stages / together, options.chunks / (options.chunks + stages - 1)
    print(
        f"step: {once:.3f} s in one process, {together:.3f} s in {stages} stages of {options.chunks} chunks"
    )
    print(
        f"efficiency {reached:.2f}, bound {bound:.2f} for stages of equal time: ratio {reached / bound:.2f}"
    )


def train(processes: int, words: list[str], run: Path) -> dict:
    """Give the summary of a run of train.py under torchrun."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(ROOT / "launcher" / "train.py"), *words],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return json.loads((run / "summary.json").read_text())


def peak(devices: dict[str, int]) -> int:
    return max(devices.values())


if __name__ == "__main__":
    main()
