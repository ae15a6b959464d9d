"""Runs of train.py in one process, one after the other: imports are paid for once.

    python tests/train_in_turn.py RUNS.json      a list of {"arguments": […], "signal_after": step or null,
                                                 "keep_steps": what to drop of the checkpoints before}

Writes the exit codes to RUNS.codes.RANK.json.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch.distributed as dist

import launcher.session
from launcher.train import main


def run(arguments: list[str], signal_after: int | None, keep_steps: int | None) -> int:
    output = Path(next(word for word in arguments if word.startswith("--output=")).removeprefix("--output="))
    if keep_steps is not None and os.environ.get("RANK", "0") == "0":
        for path in (output / "checkpoints").glob("step-*"):
            if int(path.name[5:]) > keep_steps:
                shutil.rmtree(path)
    record = launcher.session.Session.record

    def record_then_signal(session, result):  # the last rank alone is told: the others must learn of it
        last = session.distributed.rank == session.distributed.world_size - 1
        if last and session.progress.step + 1 == signal_after:
            os.kill(os.getpid(), signal.SIGUSR2)
        record(session, result)

    launcher.session.Session.record = record_then_signal
    try:
        return main(arguments)
    finally:
        launcher.session.Session.record = record


if __name__ == "__main__":
    source = Path(sys.argv[1])
    environ = dict(os.environ)
    # DeepSpeed keeps process groups in globals, which must outlive a run here
    dist.destroy_process_group = lambda: None
    codes = []
    for described in json.loads(source.read_text()):
        os.environ.clear()
        os.environ.update(environ)
        codes.append(run(described["arguments"], described.get("signal_after"), described.get("keep_steps")))
    source.with_suffix(f".codes.{environ.get('RANK', '0')}.json").write_text(json.dumps(codes))
    os._exit(0)
