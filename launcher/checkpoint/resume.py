"""Which checkpoint a run goes on from; decided by rank 0 before anything expensive starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.checkpoint.checkpoints import saved_identity, saved_step
from launcher.checkpoint.files import find
from launcher.checkpoint.identity import refuse_changes


@dataclass(frozen=True)
class Start:
    """Where a run starts: afresh, or after ``step`` of a checkpoint."""

    path: Path | None = None
    step: int | None = None
    """Steps that the run directory keeps; None for a new run, whose directory must hold none."""
    lines: tuple[str, ...] = ()
    """What to say about it."""


def choose_start(resume: str | None, run: Path | None, now: dict[str, Any], allowed: Sequence[str]) -> Start:
    """Find the checkpoint that ``--resume`` means and compare what it is of. Raises UserError."""
    found = find(resume, run)
    if found is None:
        if resume != "auto":
            return Start()
        return Start(step=0, lines=("--resume auto: no checkpoint yet, starting at step 0",))
    changes = refuse_changes(str(found.path), saved_identity(found.path), now, allowed)
    step = saved_step(found.path)
    lines = [f"passed over {reason}" for reason in found.passed_over]
    lines.append(f"resuming after step {step} from {found.path}")
    lines += [f"changed since: {change}" for change in changes]
    own = run is not None and found.path.resolve().is_relative_to(run.resolve())
    return Start(found.path, step if own else None, tuple(lines))
