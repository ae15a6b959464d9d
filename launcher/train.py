"""The training program: ``deepspeed launcher/train.py --config ds_configs/fp16_ckpt.json``.

The same program runs under ``deepspeed``, ``torchrun``, ``srun`` and plain ``python``.
"""

import argparse
import atexit
import contextlib
import os
import sys
import time
from pathlib import Path

# Started as a script, Python puts our own folder first on the path, where module names such as ``data``
# would shadow libraries. What belongs there is the repository.
_HERE = Path(__file__).resolve().parent
if sys.path and Path(sys.path[0] or ".").resolve() == _HERE:
    sys.path[0] = str(_HERE.parent)

from launcher.options import add_train_options, decode_arguments  # noqa: E402
from launcher.signals import StopRequest  # noqa: E402
from launcher.umask import keep_others_from_writing  # noqa: E402
from models.errors import UserError  # noqa: E402


def main(argv: list[str] | None = None, stop: StopRequest | None = None) -> int:
    """Parse, train, and turn an expected error into one line and its exit code."""
    parser = argparse.ArgumentParser(prog="train.py", description=__doc__.splitlines()[0])
    add_train_options(parser)
    arguments = parser.parse_args(decode_arguments(sys.argv[1:] if argv is None else argv))
    try:
        return train(arguments, stop or StopRequest())
    except UserError as error:
        if arguments.debug:
            raise
        rank = os.environ.get("RANK", "0")
        # One write, newline included: ranks share the log.
        sys.stderr.write(f"vlfit train (rank {rank}): {error}\n")
        sys.stderr.flush()
        return error.exit_code


def train(arguments: argparse.Namespace, stop: StopRequest) -> int:
    """Build the plan, the layers, the data and the engine; then loop."""
    from launcher.distributed import Distributed
    from launcher.opening import open_session
    from launcher.out_of_memory import out_of_memory_explained
    from launcher.plan import DEFAULT_MODEL

    keep_others_from_writing()
    distributed = Distributed.from_environment(os.environ)
    with stop, out_of_memory_explained(arguments.model or DEFAULT_MODEL) as watch:
        watch.session = session = open_session(arguments, distributed, stop)
        try:
            started = time.perf_counter()
            batches = session.batches()
            while not session.finished and not session.exit_code:
                session.record(session.engine.train_step(next(batches)))
            if session.finished:
                session.finish(time.perf_counter() - started)
        finally:
            session.close()
    return session.exit_code


if __name__ == "__main__":
    # Never left: a signal that comes again while the process ends must not turn "saved" into "killed by SIGTERM".
    stop = StopRequest().__enter__()
    exit_code = main(stop=stop)
    # Past this point the interpreter takes modules apart in any order, and threads with them: gloo's abort the
    # process ("terminate called without an active exception", torch 2.14), FairScale's can be waited for for
    # ever. All that must happen has happened; what registered for the exit still runs.
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # the log's disk is full
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)
