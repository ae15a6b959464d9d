"""How good is the planner's choice? Runs every plan of a small space for real, and the one that it chose among them.

    python tests/bench/plan_quality.py [--model demo tests/bench/bench_30m.yaml] [--json FILE]

One rank on the CPU: precision × micro-batch × recomputation, 27 plans and the planner's own set of layers to
recompute. The memory limit lies between the plans, so that some do not fit. The order of the runs is shuffled, and
each runs ``--repeats`` times in processes of their own; the fastest median counts, for other work on the machine
only adds. Quality is the chosen plan's measured step time over the best one's of all that fit as measured.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from launcher.memory.candidates import candidates, recompute_sets
from launcher.memory.hardware import find_hardware
from launcher.memory.plan_files import write_plan
from launcher.memory.search import search, strategy_of, table_for
from launcher.memory.simulate import predict
from launcher.memory.strategy import Strategy
from launcher.memory.timing import Cluster, LayerSeconds, step_time
from models.spec import load_spec

TRAIN = Path(__file__).parents[2] / "launcher" / "train.py"
WITHIN = 0.03


def main() -> int:
    """Print a table per model; exit code 1 where a choice is more than 3 % slower than the best."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["demo", "tests/bench/bench_30m.yaml"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--share", type=float, default=0.5, help="where the limit lies between least and most memory"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {model: _measure_model(model, arguments) for model in arguments.model}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["slower"] <= WITHIN for result in results.values()) else 1


def _measure_model(model: str, arguments: argparse.Namespace) -> dict:
    spec = load_spec(model)
    cpu = find_hardware("cpu")
    cluster = Cluster(cpu, 1, 1)
    plans = {
        f"{base.precision} {base.micro_batch_size} rows, {label}": replace(base, recompute=chosen)
        for base in candidates(spec, cluster, arguments.batch, cpu.precisions)
        for label, chosen in recompute_sets(spec).items()
    }
    sizes = sorted(predict(strategy).worst.needed_bytes for strategy in plans.values())
    limit = round(sizes[0] + arguments.share * (sizes[-1] - sizes[0]))
    small = replace(cpu, memory_bytes=limit)
    answer = search(spec, Cluster(small, 1, 1), arguments.batch, margin=0.0, precisions=cpu.precisions)
    assert answer.best is not None
    chosen = strategy_of(spec, answer.best.choices)
    name = next((name for name, strategy in plans.items() if strategy == chosen), "the planner's own")
    plans[name] = chosen
    measured: dict[str, list[dict]] = {plan: [] for plan in plans}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            order = list(plans)
            random.Random(repeat).shuffle(order)
            for number, plan in enumerate(order):
                print(f"{spec.name}: run {repeat + 1}.{number + 1} of {len(order)}", file=sys.stderr)
                place = Path(folder) / f"{repeat}-{number}"
                measured[plan].append(_train(plans[plan], place, model, arguments.steps))
    rows = []
    for plan, runs in measured.items():
        time = step_time(plans[plan], LayerSeconds(table_for(plans[plan]), cpu), cluster).seconds
        rows.append(
            {
                "plan": plan,
                "chosen": plan == name,
                "step_seconds": min(run["step_seconds_median"] for run in runs),
                "predicted_seconds": time,
                "peak_bytes": max(max(run["peak_allocated_bytes"].values()) for run in runs),
                "predicted_bytes": predict(plans[plan]).worst.needed_bytes,
            }
        )
    rows.sort(key=lambda row: row["step_seconds"])
    fitting = [row for row in rows if row["peak_bytes"] <= limit]
    mine = next(row for row in rows if row["chosen"])
    slower = mine["step_seconds"] / fitting[0]["step_seconds"] - 1
    print(f"{spec.name}: {len(rows)} plans, {len(fitting)} fit in {limit / 2**20:.0f} MiB")
    print(f"{'':44}{'s/step':>9}{'predicted':>11}{'MiB':>8}{'predicted':>11}")
    for row in rows:
        marks = (" ← chosen" if row["chosen"] else "") + (
            "" if row["peak_bytes"] <= limit else " (does not fit)"
        )
        memory = f"{row['peak_bytes'] / 2**20:8.0f}{row['predicted_bytes'] / 2**20:11.0f}"
        print(f"{row['plan']:44}{row['step_seconds']:9.3f}{row['predicted_seconds']:11.3f}{memory}{marks}")
    print(f"the chosen plan is {100 * slower:+.1f} % against the fastest that fits\n")
    return {"limit_bytes": limit, "slower": slower, "rows": rows}


def _train(strategy: Strategy, folder: Path, model: str, steps: int) -> dict:
    config, partition, _ = write_plan(
        strategy, folder, model=model, nodes=1, per_node=1, command="plan_quality"
    )
    command = [
        sys.executable,
        str(TRAIN),
        f"--config={config}",
        f"--partition={partition}",
        f"--model={model}",
    ]
    command += [f"--steps={steps}", f"--output={folder / 'run'}", "--no-eval"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads((folder / "run" / "summary.json").read_text())


if __name__ == "__main__":
    sys.exit(main())
