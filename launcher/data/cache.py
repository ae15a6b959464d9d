"""``--cache node``: one copy of a store on the node's own disk or memory, made once for all ranks.

Ranks of a node take turns at a lock file; the first copies, the others find the copy. The kernel releases
a lock when its holder dies, so a crash leaves no lock behind; a half-made copy that it leaves is removed by
the next run. Whoever uses a copy holds a shared lock on it, and the last to let go removes it.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    for root in roots if roots is not None else default_roots():
        folder = root / f"vlfit-cache-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _using(folder, store, manifest.checksum, needed) as cached:
                if isinstance(cached, Cached):
                    yield cached
                    return
                reasons.append(cached)
        except OSError as error:
            reasons.append(f"{root}: {error.strerror or error}")
    yield Cached(store, f"reading {store} in place: " + "; ".join(reasons))


@contextmanager
def _using(folder: Path, store: Path, checksum: str, needed: int) -> Iterator[Cached | str]:
    """Hold the copy in ``folder``, making it if need be; gives a reason where it does not fit."""
    copy = folder / checksum[:24]
    with _locked(folder / f"{copy.name}.lock") as turn:
        while True:
            fcntl.flock(turn, fcntl.LOCK_EX)
            outcome = _ensure(folder, copy, store, needed)
            # The kernel lets go of one lock before it gives the other: another process may come between.
            fcntl.flock(turn, fcntl.LOCK_SH)
            if isinstance(outcome, str) or copy.is_dir():
                break
        try:
            yield outcome
        finally:
            _remove_if_last(turn, copy)


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
    partial = copy.with_name(copy.name + ".partial")
    try:
        shutil.copytree(store, partial, copy_function=shutil.copyfile)
        Store.open(partial)
    except (OSError, DataError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        return f"{folder.parent}: the copy failed ({error})"
    partial.rename(copy)
    return Cached(copy, f"copied {needed / 2**30:.2f} GiB from {store} to {copy}")


def _remove_abandoned(folder: Path, keep: Path) -> None:
    """Remove what crashed runs left: half-made copies, and copies whose lock nobody holds."""
    shutil.rmtree(keep.with_name(keep.name + ".partial"), ignore_errors=True)
    for lock in folder.glob("*.lock"):
        copy = lock.with_suffix("")
        if copy == keep:
            continue
        with lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # in use by another run
            shutil.rmtree(copy, ignore_errors=True)
            shutil.rmtree(copy.with_name(copy.name + ".partial"), ignore_errors=True)


def _remove_if_last(turn: int, copy: Path) -> None:
    try:
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # other ranks still read it
    shutil.rmtree(copy, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
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
