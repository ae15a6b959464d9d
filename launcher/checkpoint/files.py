"""The folder of a checkpoint: written whole or not at all, and verified before it is read."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import UserError

CHECKSUMS = "checksums.json"
LATEST = "latest"
PARTIAL = ".partial"


@dataclass(frozen=True)
class Found:
    """A checkpoint that verifies, and why newer ones were passed over."""

    path: Path
    passed_over: tuple[str, ...] = ()


def name_of(step: int) -> str:
    """Give the folder's name; sorts by step."""
    return f"step-{step:08d}"


def find(resume: str | None, run: Path | None) -> Found | None:
    """Give the checkpoint that ``--resume`` means; None starts afresh.

    ``auto`` is the newest of ``run`` that verifies. Raises UserError where one was asked for, or is there, and
    none can be used.
    """
    if resume in (None, "none"):
        return None
    if resume == "auto":
        if run is None:
            raise UserError("--resume auto: say where the run is with --output, or it would start afresh")
        return _newest(run / "checkpoints")
    path = Path(str(resume))
    if (path / CHECKSUMS).is_file():
        problem = damage(path)
        if problem:
            raise UserError(f"--resume {path}: {problem}; give another checkpoint, or auto")
        return Found(path)
    found = _newest(path / "checkpoints")
    if found is None:
        raise UserError(f"--resume {path}: holds no checkpoint ({CHECKSUMS} is missing)")
    return found


def damage(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; None if every file is as it was written."""
    try:
        written = json.loads((path / CHECKSUMS).read_text())
        sums = written["files"]
        if written["sha256"] != _digest(sums):
            return f"{CHECKSUMS} has another checksum than when it was written"
        for name, expected in sums.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, not {expected['bytes']}"
            if checksum(file) != expected["sha256"]:
                return f"{name} has another checksum than when it was written"
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        return f"{CHECKSUMS} cannot be read ({type(error).__name__})"
    missing = {"model.safetensors", "state.json"} - sums.keys()
    return f"{CHECKSUMS} does not list {', '.join(sorted(missing))}" if missing else None


def _newest(folder: Path) -> Found | None:
    passed_over: list[str] = []
    for path in reversed(complete(folder)):
        problem = damage(path)
        if problem is None:
            return Found(path, tuple(passed_over))
        passed_over.append(f"{path.name}: {problem}")
    if passed_over:
        raise UserError(
            f"{folder}: no checkpoint can be used ({'; '.join(passed_over)}); start another run with "
            "--resume none and another --output"
        )
    return None


def forget_partial(folder: Path) -> None:
    """Take away what was not written to the end; what cannot be taken away is nothing worse than in the way."""
    for left in folder.glob(f"*{PARTIAL}"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def complete(folder: Path) -> list[Path]:
    """Give the checkpoints that were written to the end, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and path.suffix != PARTIAL)


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(sums: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def sync(path: Path) -> None:
    """Have a file or folder on the disk, not in a cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def described(path: Path) -> dict[str, Any]:
    """Sync a file and give its entry of the checksum file."""
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": checksum(path)}


def publish(partial: Path, sums: dict[str, Any], keep: int | None) -> Path:
    """Complete a checkpoint: checksums, rename, ``latest``; then drop old ones beyond ``keep``."""
    written = {"files": sums, "sha256": _digest(sums)}
    (partial / CHECKSUMS).write_text(json.dumps(written, indent=1))  # ends with "}": a byte less is noticed
    sync(partial / CHECKSUMS)
    sync(partial)
    folder, final = partial.parent, partial.with_suffix("")
    if final.exists():  # a damaged one, or one that a resumed run writes again
        shutil.rmtree(final)
    os.rename(partial, final)
    sync(folder)
    pointer = folder / f"{LATEST}{PARTIAL}"
    pointer.write_text(final.name + "\n")
    sync(pointer)
    os.replace(pointer, folder / LATEST)
    sync(folder)
    if keep:
        for old in [path for path in complete(folder) if path != final][: -(keep - 1) or None]:
            shutil.rmtree(old, ignore_errors=True)
    return final
