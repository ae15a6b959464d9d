"""Runs of train.py in one process, one after the other: imports are paid for once.

    python tests/train_in_turn.py RUNS.json      a list of {"arguments": […], and where it is not null
                                                 "signal_after": step
                                                 "keep_steps": what to drop of the checkpoints before,
                                                 "fill_after": step after which the run's disk is full,
                                                 "free_after": step after which it is not any more}

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


def run(
    arguments: list[str],
    signal_after: int | None = None,
    keep_steps: int | None = None,
    fill_after: int | None = None,
    free_after: int | None = None,
) -> int:
    output = Path(next(word for word in arguments if word.startswith("--output=")).removeprefix("--output="))
    if keep_steps is not None and os.environ.get("RANK", "0") == "0":
        for path in (output / "checkpoints").glob("step-*"):
            if int(path.name[5:]) > keep_steps:
                shutil.rmtree(path)
    (output.parent / "filler").unlink(missing_ok=True)
    record = launcher.session.Session.record

    def record_then_signal(session, result):  # the last rank alone is told: the others must learn of it
        last = session.distributed.rank == session.distributed.world_size - 1
        if last and session.progress.step + 1 == signal_after:
            os.kill(os.getpid(), signal.SIGUSR2)
        record(session, result)
        if session.distributed.rank == 0:
            filler = output.parent / "filler"
            if session.progress.step == fill_after:
                with filler.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(output).free)
            if session.progress.step == free_after:
                filler.unlink()

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
        codes.append(run(**described))
    source.with_suffix(f".codes.{environ.get('RANK', '0')}.json").write_text(json.dumps(codes))
    os._exit(0)
