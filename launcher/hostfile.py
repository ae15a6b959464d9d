"""DeepSpeed's hostfile: one ``NAME slots=N`` a line, and what is wrong with it.

DeepSpeed takes a missing file for "this node alone" and ignores what follows the number of a line.
"""

import re
from pathlib import Path

from models.errors import UserError

_LINE = re.compile(r"(\S+)\s+slots=(\d+)\s*(?:#.*)?")


def read_hostfile(path: str | Path) -> dict[str, int]:
    """Give the slots of each host, in the file's order; raises UserError naming the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--hostfile {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--hostfile {path}: not a text file") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or int(match[2]) < 1 or not re.fullmatch(r"[\w.@:-]+", match[1]):
            raise UserError(
                f"{path}: line {number}: {line!r} is not of the form NAME slots=N, such as: node1 slots=8"
            )
        if match[1] in hosts:
            raise UserError(f"{path}: line {number}: host {match[1]} is listed twice")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise UserError(f"{path}: no host in it; each line is: NAME slots=N")
    return hosts
