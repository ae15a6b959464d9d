"""Errors that a user can cause, and the exit code of each kind.

An expected error is one or two lines: what is wrong, in which file and key, and what to do.
The command line prints it without a traceback (unless ``--debug``) and exits with ``exit_code``.
"""


class UserError(Exception):
    """Wrong use or configuration; exit code 2."""

    exit_code = 2


class DataError(UserError):
    """The data is missing, damaged or does not match; exit code 3."""

    exit_code = 3


class DoesNotFit(UserError):
    """Out of memory, or no plan fits; exit code 4."""

    exit_code = 4


EXIT_INTERRUPTED = 75
"""Stopped by a signal after saving (EX_TEMPFAIL of sysexits.h: a scheduler may requeue)."""
