"""``--cache node``: one copy of a store on the node's own disk or memory, made once for all ranks.

Ranks of a node take turns at a lock file: the first copies, the others find the copy. While they use it they
share a second lock, and the last to let go removes the copy. The kernel releases the locks of a process that
dies, so a crash leaves none behind; the copy, whole or half-made, that it leaves is used or removed by the
next run.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.data.manifest import MANIFEST, Manifest
from launcher.data.store import Store
from models.errors import DataError

_SPARE_BYTES = 256 << 20
"""Left free on the cache's disk for everybody else."""


@dataclass(frozen=True)
class Cached:
    """Where to read the store, and a sentence that says why there."""

    path: Path
    message: str


def default_roots() -> list[Path]:
    """Folders on the node to try, in this order: the job's own disk, the node's, its memory."""
    named = [os.environ.get(name) for name in ("SLURM_TMPDIR", "TMPDIR")]
    return [Path(name) for name in named if name] + [Path("/tmp"), Path("/dev/shm")]


@contextmanager
def node_cache(store: str | Path, roots: Sequence[Path] | None = None) -> Iterator[Cached]:
    """Give the path of a copy of ``store`` on this node while the context lasts.

    Falls back to ``store`` itself, with the numbers in the message, if no root has the space.
    """
    store = Path(store).absolute()
    manifest = Manifest.read(store)
    if roots is None and any(_same_disk(store, root) for root in default_roots()):
        yield Cached(store, f"{store} is on the node's own disk: read in place")
        return
    needed = manifest.total_bytes + (store / MANIFEST).stat().st_size
    reasons = []
    with ExitStack() as uses:
        for root in roots if roots is not None else default_roots():
            folder = root / f"vlfit-cache-{os.getuid()}"
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                cached = uses.enter_context(_using(folder, store, manifest.checksum, needed))
            except OSError as error:
                cached = f"{root}: {error.strerror or error}"
            if isinstance(cached, Cached):
                break
            reasons.append(cached)
        else:
            cached = Cached(store, f"reading {store} in place: " + "; ".join(reasons))
        yield cached


@contextmanager
def _using(folder: Path, store: Path, checksum: str, needed: int) -> Iterator[Cached | str]:
    """Hold the copy in ``folder``, making it if need be; gives a reason where it does not fit."""
    copy = folder / checksum[:24]
    with _opened(_turn_lock(copy)) as turn, _opened(_use_lock(copy)) as use:
        fcntl.flock(turn, fcntl.LOCK_EX)
        outcome = _ensure(folder, copy, store, needed)
        fcntl.flock(use, fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            yield outcome
        finally:
            fcntl.flock(use, fcntl.LOCK_UN)
            fcntl.flock(turn, fcntl.LOCK_EX)
            if _free(use):
                shutil.rmtree(copy, ignore_errors=True)


def _ensure(folder: Path, copy: Path, store: Path, needed: int) -> Cached | str:
    _remove_abandoned(folder, keep=copy)
    if copy.is_dir():
        try:
            Store.open(copy)
            return Cached(copy, f"using the node's copy {copy}")
        except DataError:  # somebody tampered with it
            shutil.rmtree(copy)
    free = _free_bytes(folder)
    if needed + _SPARE_BYTES > free:
        return f"{folder.parent} has {free / 2**30:.2f} GiB free, a copy takes {needed / 2**30:.2f} GiB"
    partial = _partial(copy)
    try:
        shutil.copytree(store, partial, copy_function=shutil.copyfile)
        Store.open(partial)
    except (OSError, DataError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        return f"{folder.parent}: the copy failed ({error})"
    partial.rename(copy)
    return Cached(copy, f"copied {needed / 2**30:.2f} GiB from {store} to {copy}")


def _remove_abandoned(folder: Path, keep: Path) -> None:
    """Remove what crashed runs left: half-made copies, and copies that nobody uses."""
    shutil.rmtree(_partial(keep), ignore_errors=True)
    for copy in [lock.with_suffix("") for lock in folder.glob("*.turn")]:
        if copy != keep:
            with _opened(_turn_lock(copy)) as turn, _opened(_use_lock(copy)) as use:
                if _free(turn) and _free(use):
                    shutil.rmtree(copy, ignore_errors=True)
                    shutil.rmtree(_partial(copy), ignore_errors=True)


def _turn_lock(copy: Path) -> Path:
    """Held alone while a copy is made or removed."""
    return copy.with_suffix(".turn")


def _use_lock(copy: Path) -> Path:
    """Held together by all who read the copy; taken and let go for good only by who has the turn."""
    return copy.with_suffix(".use")


def _partial(copy: Path) -> Path:
    return copy.with_suffix(".partial")


def _free(descriptor: int) -> bool:
    """Take a lock alone if nobody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a lock file, and let go of its lock at the end.

    The file stays behind, empty: removing it would let two processes lock two files.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _same_disk(one: Path, other: Path) -> bool:
    try:
        return one.stat().st_dev == other.stat().st_dev
    except OSError:
        return False


def _free_bytes(folder: Path) -> int:
    """Space on the disk; where that is memory (tmpfs), no more than the memory available."""
    free = shutil.disk_usage(folder).free
    if Path("/dev/shm") in folder.parents:
        import psutil

        free = min(free, psutil.virtual_memory().available)
    return free
