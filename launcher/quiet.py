"""Keeps standard output for results."""

import contextlib
import sys


def import_deepspeed() -> None:
    """Import DeepSpeed so that its log goes to standard error: its handler keeps the stdout of its import."""
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401
