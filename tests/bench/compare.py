"""Memory and step time of configs on a 30M spec at batch 32, in real runs: ``python tests/bench/compare.py``.

Must hold on the CPU: bf16_ckpt at most 0.45 of fp32's measured peak, and at most 1.15 of its step time.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from synthetic import synthetic_store

from launcher.compare import compare, print_table
from models.spec import load_spec

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", nargs="+", default=["fp32", "bf16", "bf16_ckpt"])
    parser.add_argument("--model", default=str(HERE / "bench_30m.yaml"))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", help="also write JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments.data = str(synthetic_store(folder, load_spec(arguments.model), 2 * arguments.batch))
        arguments.seed, arguments.partition, arguments.output = 0, None, str(folder / "runs")
        configs = []
        for config in arguments.config:
            data = json.loads((ROOT / "ds_configs" / f"{config}.json").read_text())
            path = folder / f"{config}.json"
            path.write_text(json.dumps(data | {"train_batch_size": arguments.batch}))
            configs.append(str(path))
        arguments.config = configs
        runs = compare(arguments)
    print_table(runs, as_json=False)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps([asdict(run) for run in runs], indent=1))


if __name__ == "__main__":
    main()
