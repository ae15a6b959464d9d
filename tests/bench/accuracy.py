"""Predicted against measured peak memory, in real runs of the real engines on the CPU.

    python tests/bench/accuracy.py [--only WORD …] [--json FILE] [--list]

Every plan trains three steps. Measured is what torch's CPU allocator handed out (``launcher/memory/allocator.cpp``);
predicted is what ``vlfit estimate`` says of the same files. DeepSpeed's and accelerate's own estimators stand
beside: they count weights, gradients and optimizer state.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
STEPS = 3
MODELS = {
    "demo": ROOT / "models" / "specs" / "demo.yaml",
    "30m": Path(__file__).with_name("bench_30m.yaml"),
    "base": ROOT / "models" / "specs" / "bert_vit_base.yaml",
}
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
STAGES = {
    1: [["*"]],
    2: [["image.*"], ["text.*", "fusion.*", "head"]],
    3: [["image.*"], ["text.*"], ["fusion.*", "head"]],
}


@dataclass(frozen=True)
class Case:
    """One plan. ``image`` and ``length`` change the model's sizes; 0 leaves them."""

    model: str = "demo"
    precision: str = "fp32"
    recompute: str = "none"
    rows: int = 8
    accumulation: int = 1
    zero: int = 0
    ranks: int = 1
    pipeline: str = ""
    stages: int = 2
    chunks: int = 2
    image: int = 0
    length: int = 0
    bucket: int = 0

    @property
    def name(self) -> str:
        """All that differs from the plainest case."""
        words = [self.model, self.precision, f"{self.rows} rows"]
        words += [f"× {self.accumulation}"] if self.accumulation > 1 else []
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += [f"ZeRO {self.zero}"] if self.zero or not self.pipeline else []
        words += [f"{self.pipeline} {self.stages} stages {self.chunks} chunks"] if self.pipeline else []
        words += [f"{self.ranks} ranks"] if self.ranks > 1 else []
        words += [f"{self.image} px"] if self.image else []
        words += [f"{self.length} tokens"] if self.length else []
        words += [f"bucket {self.bucket:.0e}"] if self.bucket else []
        return ", ".join(words)

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows."""
        return self.ranks // self.stages if self.pipeline == "deepspeed" else self.ranks


def cases() -> Iterator[Case]:
    """All plans of the table."""
    rows = {"none": 16, "fusion": 8, "all": 4}
    for precision in PRECISIONS:
        for recompute, number in rows.items():
            yield Case("demo", precision, recompute, number)
            yield Case("30m", precision, recompute, number // 2 if precision == "bf16" else number)
            for zero in (1, 2, 3):
                yield Case("demo", precision, recompute, 24 - number, zero=zero, bucket=200_000)
                yield Case("demo", precision, recompute, number, zero=zero, ranks=2, bucket=500_000)
        for zero in (1, 2, 3):
            yield Case("30m", precision, "fusion", 4, zero=zero, ranks=2, bucket=5_000_000)
            yield Case("demo", precision, rows=8, accumulation=3, zero=zero, ranks=2, bucket=300_000)
        for pipeline, ranks in (("fairscale", 1), ("deepspeed", 2)):
            yield Case("30m", precision, "none", 8, pipeline=pipeline, ranks=ranks)
            yield Case("30m", precision, "all", 8, pipeline=pipeline, ranks=ranks)
            yield Case("demo", precision, "fusion", 16, 2, pipeline=pipeline, ranks=ranks, chunks=4)
        first = {"pipeline": "fairscale"}
        yield Case("demo", precision, "none", 16, ranks=2, chunks=4, **first)
        yield Case("demo", precision, "all", 16, 3, ranks=2, zero=1, chunks=8, **first)
        yield Case("demo", precision, "none", 16, stages=3, chunks=2, **first)
        yield Case("demo", precision, "fusion", 16, 3, chunks=1, **first)
        one_f_one_b = {"pipeline": "deepspeed"}
        yield Case("demo", precision, "none", 16, ranks=3, stages=3, chunks=4, **one_f_one_b)
        yield Case("demo", precision, "all", 8, ranks=2, zero=1, chunks=2, bucket=300_000, **one_f_one_b)
        yield Case("demo", precision, "none", 8, 2, ranks=4, chunks=2, **one_f_one_b)
        yield Case("demo", precision, "fusion", 8, ranks=4, zero=1, chunks=1, bucket=300_000, **one_f_one_b)
    yield Case("demo", "fp32", "none", 14, pipeline="fairscale", chunks=4)
    yield Case("30m", "fp32", "fusion", 8, 2, pipeline="fairscale", ranks=2, zero=1)
    for rows_now, image, length in ((2, 96, 0), (16, 32, 40), (16, 64, 8), (2, 0, 64)):
        yield Case("demo", "fp32", "none", rows_now, image=image, length=length)
        yield Case("30m", "autocast", "all", rows_now, image=image * 2, length=length)
    for chunks in (1, 8):
        yield Case("30m", "fp32", "none", 16, pipeline="deepspeed", ranks=2, chunks=chunks)
    yield Case("demo", "fp32", "none", 16, accumulation=3)
    yield Case("demo", "bf16", "none", 8, accumulation=3)
    yield Case("demo", "fp32", "none", 8, zero=0, ranks=2)
    yield Case("demo", "bf16", "fusion", 8, zero=0, ranks=2)
    yield Case("base", "fp32", "none", 4, image=64)
    yield Case("base", "fp32", "all", 4, image=64, zero=2)
    yield Case("base", "autocast", "fusion", 4, image=64)
    yield Case("base", "fp32", "none", 4, image=64, zero=3, ranks=2, bucket=50_000_000)


def write_plan(case: Case, folder: Path) -> list[str]:
    """Write the plan files; gives train.py's options for them."""
    spec = yaml.safe_load(MODELS[case.model].read_text())
    spec["image"]["size"] = case.image or spec["image"]["size"]
    spec["text"]["length"] = case.length or spec["text"]["length"]
    # Two rows have no group of four.
    together = case.rows // (case.chunks if case.pipeline == "deepspeed" else 1)
    spec["objectives"]["itm"]["group"] = min(spec["objectives"]["itm"]["group"], together)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.rows,
        "gradient_accumulation_steps": case.accumulation,
        "train_batch_size": case.rows * case.accumulation * case.data_ranks,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **PRECISIONS[case.precision],
    }
    if case.zero:
        settings["zero_optimization"] = {"stage": case.zero}
        if case.bucket:
            settings["zero_optimization"]["reduce_bucket_size"] = case.bucket
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    words = [f"--config={folder}/config.json", f"--model={folder}/model.yaml"]
    recompute = {"none": [], "fusion": ["fusion.*"], "all": ["image.block.*", "text.layer.*", "fusion.*"]}
    if case.pipeline or case.recompute != "none":
        stages = STAGES[case.stages if case.pipeline else 1]
        partition = {
            "model": spec["name"],
            "chunks": case.chunks if case.pipeline else 1,
            "stages": [
                {"name": f"stage {device}", "layers": layers, "device": device}
                for device, layers in enumerate(stages)
            ],
            "recompute": recompute[case.recompute],
        }
        (folder / "partition.yaml").write_text(yaml.safe_dump(partition))
        words.append(f"--partition={folder}/partition.yaml")
    if case.pipeline:
        words.append(f"--pipeline={case.pipeline}")
    return words


def predict(words: list[str], ranks: int) -> dict[str, int]:
    """Peak bytes per device, as ``vlfit estimate --json`` gives them for these files."""
    from launcher.config.device import DeviceSupport
    from launcher.memory import simulate
    from launcher.memory.strategy import Strategy
    from launcher.plan import make_plan

    given = dict(word.removeprefix("--").split("=", 1) for word in words)
    plan = make_plan(
        config=given["config"],
        model=given["model"],
        partition=given.get("partition"),
        pipeline=given.get("pipeline"),
        steps=STEPS,
        epochs=None,
        samples=64,
        world_size=ranks,
        device=DeviceSupport.detect(),
    )
    return simulate.predict(Strategy.of(plan, ranks, "cpu")).peak_bytes


def measure(found: list[Case], words: dict[Case, list[str]], folder: Path) -> dict[Case, list[int] | str]:
    """Train each case in fresh processes, forked from one that has the imports done; peak bytes of each rank."""
    stores: dict[tuple, Path] = {}
    runs, outputs = [], {}
    for number, case in enumerate(found):
        store = _store(words[case], stores, folder)
        outputs[case] = folder / "runs" / str(number)
        more = [f"--data={store}", f"--output={outputs[case]}", f"--steps={STEPS}", "--no-eval"]
        arguments = [*words[case], *more, "--save-every=none", "--device=cpu"]
        runs.append({"ranks": case.ranks, "arguments": arguments, "log": str(folder / f"log-{number}.txt")})
    source = folder / "runs.json"
    source.write_text(json.dumps(runs))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, __file__, "--fork", str(source)], env=environ, cwd=ROOT, check=True)
    measured: dict[Case, list[int] | str] = {}
    for number, case in enumerate(found):
        summary = outputs[case] / "summary.json"
        if summary.exists():
            peaks = json.loads(summary.read_text())["peak_allocated_bytes_by_rank"]
            measured[case] = [max(peak.values()) for peak in peaks]
        else:
            measured[case] = (folder / f"log-{number}.txt").read_text()[-600:]
    return measured


def fork_runs(source: Path) -> None:
    """Import once, then fork the ranks of each run."""
    from forked_ranks import fork_ranks, import_libraries

    import_libraries()
    for run in json.loads(source.read_text()):
        for child in fork_ranks(run["arguments"], run["ranks"], Path(run["log"])):
            os.waitpid(child, 0)


def _store(words: list[str], stores: dict[tuple, Path], folder: Path) -> Path:
    """A store of this model's sizes."""
    from synthetic import synthetic_store

    from models.spec import load_spec

    spec = load_spec(next(word for word in words if word.startswith("--model=")).removeprefix("--model="))
    key = (spec.image.size, spec.text.length, spec.text.vocab_size)
    if key not in stores:
        stores[key] = synthetic_store(folder / "data" / "-".join(map(str, key)), spec, 128)
    return stores[key]


def others(words: list[str], case: Case) -> dict[str, int]:
    """What other tools say of the same plan: DeepSpeed's estimators (one GPU a rank, no offload), and
    accelerate's rule for training with Adam: four times the weights."""
    import contextlib
    import io

    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    from models.build import build_layers
    from models.spec import load_spec

    spec = load_spec(next(word for word in words if word.startswith("--model=")).removeprefix("--model="))
    sizes = [[p.numel() for p in layer.parameters()] for layer in build_layers(spec, device="meta")]
    total, largest = sum(map(sum, sizes)), max(map(sum, sizes))
    with contextlib.redirect_stdout(io.StringIO()):
        if case.zero == 3:
            deepspeed = estimate_zero3_model_states_mem_needs(
                total, largest, num_gpus_per_node=case.data_ranks, cpu_offload=False, cpu_offload_params=False
            )[1]
        else:
            deepspeed = estimate_zero2_model_states_mem_needs(
                total, num_gpus_per_node=case.data_ranks, cpu_offload=False
            )[1]
    width = 2 if case.precision == "bf16" else 4
    return {"deepspeed": int(deepspeed), "accelerate": 4 * width * total}


def main() -> int:
    """Print the table; exit code 1 where it misses what the project promises."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="plans whose name has all of these"
    )
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--list", action="store_true", help="print the plans only")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep plans and runs here")
    parser.add_argument("--fork", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fork:
        fork_runs(options.fork)
        return 0
    found = [case for case in dict.fromkeys(cases()) if all(word in case.name for word in options.only)]
    if options.list:
        print("\n".join(case.name for case in found))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        words = {case: write_plan(case, folder / "plans" / str(number)) for number, case in enumerate(found)}
        predicted = {case: predict(words[case], case.ranks) for case in found}
        measured = measure(found, words, folder)
        beside = {case: others(words[case], case) for case in found}
    return report(found, predicted, measured, beside, options.json)


def report(
    found: list[Case],
    predicted: dict[Case, dict[str, int]],
    measured: dict[Case, list[int] | str],
    beside: dict[Case, dict[str, int]],
    file: Path | None,
) -> int:
    """One line a plan: of the ranks of a pipeline, the one with the largest error."""
    lines, errors, failed = [], [], 0
    print(f"{'measured':>10} {'predicted':>10} {'error':>8} {'DeepSpeed':>10} {'accelerate':>10}   MiB")
    for case in found:
        real = measured[case]
        if isinstance(real, str):
            print(f"{'failed':>10}  {case.name}: {real}")
            failed += 1
            continue
        said = list(predicted[case].values())
        # One prediction for all ranks, or one for each stage; FairScale's stages share the process on the CPU.
        if len(said) == 1:
            pairs = [(said[0], max(real))]
        else:
            replicas = len(real) // len(said)
            pairs = [(one, max(real[i * replicas : (i + 1) * replicas])) for i, one in enumerate(said)]
        expected, peak = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
        error = expected / peak - 1
        errors.append(error)
        other = [beside[case][name] / 2**20 for name in ("deepspeed", "accelerate")]
        print(
            f"{peak / 2**20:10.2f} {expected / 2**20:10.2f} {error:8.2%} {other[0]:10.1f} {other[1]:10.1f}"
            f"   {case.name}"
        )
        lines.append(
            {"plan": case.name, "measured": peak, "predicted": expected, "error": error, **beside[case]}
        )
    if not errors:
        return 1
    sizes = sorted(abs(error) for error in errors)
    result = {
        "plans": len(errors),
        "median": statistics.median(sizes),
        "worst": sizes[-1],
        "lowest": min(errors),
    }
    print(
        f"{len(errors)} plans: median error {result['median']:.2%}, worst {result['worst']:.2%}, "
        f"lowest {result['lowest']:.2%}; {failed} failed"
    )
    for name in ("deepspeed", "accelerate"):
        ratios = [abs(line[name] / line["measured"] - 1) for line in lines]
        print(f"{name}: median error {statistics.median(ratios):.0%}")
    if file:
        file.write_text(json.dumps(result | {"table": lines}, indent=1))
    good = result["median"] <= 0.01 and result["worst"] <= 0.04 and result["lowest"] >= -0.02
    return 0 if good and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
