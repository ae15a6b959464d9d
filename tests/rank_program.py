"""A small real training program, to be started by launchers in tests.

It takes train.py's options and keeps its protocol: ranks agree on a signal at a step, rank 0 saves, and
all exit 75; ``--resume=auto`` goes on. Linear regression by torch.distributed (gloo); the global batch of
a step is the same for every world size. ``TEST_*`` variables make it slow or make a rank fail.

    metrics.jsonl    {"step", "loss", "samples", "restart", "world_size"} for every step
    ranks/RANK.json  {"argv", "rank", "local_rank", "node_rank", "pid", "child", …} at the start
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from launcher.distributed import Distributed
from launcher.options import add_train_options, decode_arguments
from launcher.rendezvous import interface_towards
from launcher.signals import SAVE_SIGNALS, die_with_parent, shielded_children
from models.errors import EXIT_INTERRUPTED, DataError, UserError

GLOBAL_BATCH, FEATURES = 4, 3
received: list[int] = []


def main() -> int:
    shared = Path("environment.json")  # for hosts that ssh reaches without our variables
    if shared.exists():
        os.environ.update(json.loads(shared.read_text()))
    argv = decode_arguments(sys.argv[1:])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_train_options(parser)
    options = parser.parse_args(argv)
    for number in SAVE_SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        process = Distributed.from_environment(os.environ)
        if options.data and not Path(options.data).exists():
            raise DataError(
                f"{options.data}: no such data store on {os.environ.get('SLURMD_NODENAME', 'this node')}"
            )
        if "TEST_WORLD" in os.environ:
            process.require_world_size(int(os.environ["TEST_WORLD"]), options.config)
        return train(options, process, argv)
    except UserError as error:
        print(f"rank_program: {error}", file=sys.stderr)
        return error.exit_code


def train(options: argparse.Namespace, process: Distributed, argv: list[str]) -> int:
    output = Path(options.output)
    # what a data-loading worker is to a rank: a child that knows nothing of signals
    with shielded_children():
        child = (
            subprocess.Popen(["sleep", "600"], preexec_fn=die_with_parent)
            if "TEST_CHILD" in os.environ
            else None
        )
    (output / "ranks").mkdir(parents=True, exist_ok=True)
    described = vars(process) | {"argv": argv, "pid": os.getpid(), "child": child and child.pid}
    (output / "ranks" / f"{process.rank}.json").write_text(json.dumps(described))
    if "TEST_NO_TORCH" in os.environ:
        return idle(options.steps, output, child)
    import torch
    import torch.distributed as dist

    os.environ.update(process.environment())
    interface = interface_towards(process.master_address) if process.nodes > 1 else None
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if process.rank == 0:
        print("\n".join(process.header("gloo", "cpu")), flush=True)
    torch.manual_seed(options.seed or 0)
    data = torch.randn(64, FEATURES)
    weight = torch.zeros(FEATURES, requires_grad=True)
    first = 0
    checkpoint = output / "checkpoint.pt"
    if options.resume == "auto" and checkpoint.exists():
        saved = torch.load(checkpoint)
        first, weight = saved["step"], saved["weight"].requires_grad_()
    # slow until it is interrupted, then fast
    step_seconds = 0 if first else float(os.environ.get("TEST_STEP_SECONDS", "0"))
    for step in range(first, options.steps):
        time.sleep(step_seconds)
        if os.environ.get("TEST_FAIL") == f"{process.rank}:{step}":
            raise RuntimeError(f"rank {process.rank} was told to fail")
        samples = [(step * GLOBAL_BATCH + i) % len(data) for i in range(GLOBAL_BATCH)]
        mine = data[samples[process.rank :: process.world_size]]
        loss = ((mine @ weight - mine.sum(1)) ** 2).sum() / GLOBAL_BATCH
        loss.backward()
        shared = torch.cat([weight.grad, loss.detach()[None], torch.tensor([float(bool(received))])])
        dist.all_reduce(shared)
        with torch.no_grad():
            weight -= 0.1 * shared[:FEATURES]
            weight.grad = None
        if process.rank == 0:
            line = {"step": step + 1, "loss": shared[FEATURES].item(), "samples": samples}
            line |= {"restart": os.environ.get("SLURM_RESTART_COUNT", "0"), "world_size": process.world_size}
            with (output / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps(line) + "\n")
            print(f"step {step + 1} loss {shared[FEATURES].item():.6f}", flush=True)
        if shared[-1] > 0 and step + 1 < options.steps:
            if process.rank == 0:
                torch.save({"step": step + 1, "weight": weight.detach()}, checkpoint)
                print(f"saved after step {step + 1}", flush=True)
            dist.barrier()
            dist.destroy_process_group()  # without it gloo's threads may abort at exit (torch 2.14)
            return end(EXIT_INTERRUPTED, child)
    dist.barrier()
    dist.destroy_process_group()
    return end(0, child)


def idle(steps: int, output: Path, child: subprocess.Popen | None) -> int:
    """Steps without torch, for tests of launchers: starts ten times faster."""
    for _ in range(steps):
        (output / "metrics.jsonl").touch()
        time.sleep(float(os.environ.get("TEST_STEP_SECONDS", "0")))
        if received:
            (output / "checkpoint.pt").touch()
            return end(EXIT_INTERRUPTED, child)
    return end(0, child)


def end(code: int, child: subprocess.Popen | None) -> int:
    if child is not None:
        print(f"child {'alive' if child.poll() is None else child.returncode}", flush=True)
        child.kill()
        child.wait()
    return code


if __name__ == "__main__":
    code = main()
    # As train.py does: Python's own end gives signals back to the system (3.11), and one that is sent twice, as to two
    # hosts of one process table, would then kill a rank that has saved.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
