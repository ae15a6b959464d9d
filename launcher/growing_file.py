"""A file that grows by lines, and outlives a full disk."""

from pathlib import Path


class GrowingFile:
    """Appends to a file; what the disk does not take is kept, and written before what comes next."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)  # a buffer would drop what a failed write left in it
        self._waiting = b""

    def write_line(self, line: str) -> OSError | None:
        """Append a line; gives why it has to wait, or None."""
        self._waiting += line.encode() + b"\n"
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """Close it; lines that still wait are lost."""
        self._file.close()
