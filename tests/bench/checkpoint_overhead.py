"""What a checkpoint every 100 steps costs the demo run: ``python tests/bench/checkpoint_overhead.py``.

One run, blocks of 100 steps; every second block ends with a checkpoint, written as train.py writes it. The cost is
the save itself and what the ten steps after it take longer than the block's median. At most 2% of a block.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
EVERY, AFTER, LIMIT = 100, 10, 0.02


def main() -> int:
    """Print the seconds of blocks with and without; exit code 1 beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(ROOT / "ds_configs" / "bf16_ckpt.json"))
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument(
        "--folder", help="where to write, to measure that file system (default: a temporary folder)"
    )
    arguments = parser.parse_args()

    from launcher.distributed import Distributed
    from launcher.opening import open_session
    from launcher.options import add_train_options
    from launcher.signals import StopRequest

    options = argparse.ArgumentParser()
    add_train_options(options)
    warm_up = 20
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        words = [f"--config={arguments.config}", f"--output={folder}/run", "--no-eval", "--keep=2"]
        words.append(f"--steps={warm_up + arguments.blocks * EVERY + 1}")
        session = open_session(options.parse_args(words), Distributed.from_environment({}), StopRequest())
        batches = session.batches()

        def train(steps: int) -> list[float]:
            seconds = []
            for _ in range(steps):
                started = time.perf_counter()
                session.record(session.engine.train_step(next(batches)))
                seconds.append(time.perf_counter() - started)
            return seconds

        train(warm_up)
        plain: list[float] = []
        costs: list[float] = []
        blocks: dict[bool, list[float]] = {True: [], False: []}
        after_save = 0.0
        size = 0
        for number in range(arguments.blocks):
            saves = number % 2 == 1
            started = time.perf_counter()
            seconds = train(EVERY)
            if after_save:
                costs[-1] += max(0.0, sum(seconds[:AFTER]) - AFTER * statistics.median(seconds))
            plain.append(sum(seconds))
            after_save = 0.0
            if saves:
                before = time.perf_counter()
                session.save(required=True)
                after_save = time.perf_counter() - before
                costs.append(after_save)
                newest = max(Path(folder, "run", "checkpoints").glob("step-*"))
                size = sum(path.stat().st_size for path in newest.iterdir())
            blocks[saves].append(time.perf_counter() - started)
        session.close()
    share = statistics.median(costs) / statistics.median(plain)
    print(
        f"{EVERY} steps {statistics.median(blocks[False]):.2f} s without, {statistics.median(blocks[True]):.2f} s with "
        f"a checkpoint of {size / 2**20:.0f} MiB, which costs {statistics.median(costs):.3f} s: {share:.2%} "
        f"(at most {LIMIT:.0%})"
    )
    return int(share > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
