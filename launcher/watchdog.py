"""Ends a launch whose supervisor was killed: ``python -m launcher.watchdog LAUNCH_ID SAVE_SECONDS``.

Its standard input is a pipe from the supervisor. A line means that all is well; the end of the pipe
without one means that the supervisor is gone (kill -9) and nobody else would end its processes.
"""

import signal
import sys

from launcher.family import end


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the supervisor
    if not sys.stdin.readline():
        end(sys.argv[1], save_seconds=float(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
