"""SLURM's compact lists, expanded without ``scontrol``, which may be absent inside a container."""

import re

from models.errors import UserError

_PARTS = re.compile(r",(?![^\[]*\])")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hostlist(compact: str) -> list[str]:
    """Give the node names of a list such as ``gpu[001-003,7],login`` in SLURM's order.

    Several brackets in one name vary from left (slowest) to right, as in ``scontrol show hostnames``.
    Raises UserError when the list is empty or malformed.
    """
    names = [name for part in _PARTS.split(compact.strip()) if part for name in _expand_name(part, compact)]
    if not names:
        raise UserError(f"SLURM's node list {compact!r} is empty")
    return names


def _expand_name(name: str, compact: str) -> list[str]:
    bracket = _BRACKET.search(name)
    if bracket is None:
        if "[" in name or "]" in name:
            raise UserError(f"SLURM's node list {compact!r} is malformed at {name!r}")
        return [name]
    before, after = name[: bracket.start()], name[bracket.end() :]
    numbers: list[str] = []
    for part in bracket[1].split(","):
        bounds = _RANGE.fullmatch(part)
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise UserError(f"SLURM's node list {compact!r} is malformed at {part!r}")
        width = len(bounds[1])  # leading zeros of the first number are kept: 08-10 is 08, 09, 10
        numbers += [f"{n:0{width}d}" for n in range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)]
    return [f"{before}{number}{rest}" for number in numbers for rest in _expand_name(after, compact)]


def expand_counts(compact: str) -> list[int]:
    """Give one number per node of a list such as ``4(x2),3`` (``SLURM_TASKS_PER_NODE``): 4, 4, 3."""
    counts: list[int] = []
    for part in compact.split(","):
        match = _REPEATED.fullmatch(part.strip())
        if match is None:
            raise UserError(f"SLURM's list of tasks per node {compact!r} is malformed at {part!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
