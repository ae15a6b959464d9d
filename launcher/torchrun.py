"""torchrun with the exit code of the rank that failed first: ``python -m launcher.torchrun …``.

torchrun itself exits 1 whatever its ranks said, so that 75 (saved, may be requeued) would be lost.
"""

import sys


def main() -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} failed with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
