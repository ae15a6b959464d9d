"""Batches of tensors for one rank, from a store and a plan.

With workers, torch's DataLoader runs them. They come from a fork server that has imported torch once, so
they share its memory and inherit no thread, lock or CUDA context of the training process; they reopen the
store by its path, and leave signals to the rank.
"""

import atexit
import multiprocessing.connection
import os
import shutil
import signal
import weakref
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from launcher.data.batches import MicroBatch, Plan
from launcher.data.helper_process import follow_parent
from launcher.data.order import DataPosition
from launcher.data.store import Store
from launcher.signals import shielded_children
from models.errors import UserError

_PREFETCH = 2


class RawBatch(NamedTuple):
    """One micro-batch of one rank, before augmentation, masking and normalisation."""

    images: Tensor
    """uint8 [B,3,S,S]."""
    input_ids: Tensor
    """int64 [B,L], padded with the store's ``pad_id``."""
    attention_mask: Tensor
    """bool [B,L]: true for real tokens."""
    sample_ids: Tensor
    """int64 [B]."""
    image_ids: Tensor
    """int64 [B]: equal for the same picture."""
    caption_ids: Tensor
    """int64 [B]: equal for the same text."""
    rows: Tensor
    """int64 [B]: a number that no other sample of the run has, whatever the ranks and workers."""
    weights: Tensor
    """float32 [B]: summing to 1 over the rows of all ranks in the optimizer step."""


class Loader:
    """Iterates RawBatch from ``start`` on, without end: epoch follows epoch.

    Each step of the plan gives the same number of batches on every rank. The caller moves its
    DataPosition by ``plan.after`` when the optimizer has stepped; what workers prefetch does not count.
    """

    def __init__(
        self,
        store: Store,
        plan: Plan,
        *,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        start: DataPosition | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.batches = StoreBatches(store)
        self.requests = _Requests(plan, start or DataPosition(), rank, world_size)
        self.workers = workers
        self.pin_memory = pin_memory

    def __iter__(self) -> Iterator[RawBatch]:
        if not self.workers:
            return map(self.batches.__getitem__, self.requests)
        batches = self._from_workers()
        _open_iterators.add(batches)
        return batches

    def _from_workers(self) -> Generator[RawBatch, None, None]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["launcher.data.loader"])
        check_shared_memory(self.workers, self.batches.batch_bytes(next(iter(self.requests))))
        with shielded_children():  # until _start_worker runs, a signal would end a worker
            batches: Any = iter(
                DataLoader(
                    self.batches,
                    sampler=self.requests,
                    batch_size=None,
                    collate_fn=_as_it_is,  # type: ignore[arg-type]  # batch_size=None: gets one item, no list
                    num_workers=self.workers,
                    prefetch_factor=_PREFETCH,
                    multiprocessing_context=context,
                    worker_init_fn=_start_worker,
                    pin_memory=self.pin_memory,
                )
            )
        try:
            yield from batches
        except (RuntimeError, OSError, EOFError) as error:
            # Which of them torch raises depends on what it was doing: waiting, or mapping a batch.
            lost = _first_lost(batches._workers)
            if lost is None:
                raise
            raise UserError(f"a data worker {_end_of(lost)}; fewer --workers need less memory") from error
        finally:
            for worker in batches._workers:
                worker.kill()


_open_iterators: "weakref.WeakSet[Generator[RawBatch, None, None]]" = weakref.WeakSet()


@atexit.register
def _close_iterators() -> None:
    """Dismiss the workers of iterators that are still open when Python exits.

    Without this, multiprocessing ends them with SIGTERM, which they leave to the rank, and waits forever.
    """
    for iterator in list(_open_iterators):
        iterator.close()


class StoreBatches(Dataset):
    """Maps a MicroBatch to tensors; pickles as the path of its store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getitem__(self, batch: MicroBatch) -> RawBatch:
        store = self.store
        image_ids = store.image_ids[batch.sample_ids]
        caption_ids = store.caption_ids[batch.sample_ids]
        size = store.manifest.image_size
        images_B3SS = _empty((len(image_ids), 3, size, size))
        store.gather_images(image_ids, images_B3SS.numpy())
        ids_BL, mask_BL = store.gather_tokens(caption_ids, batch.length)
        return RawBatch(
            images=images_B3SS,
            input_ids=torch.from_numpy(ids_BL),
            attention_mask=torch.from_numpy(mask_BL),
            sample_ids=torch.from_numpy(batch.sample_ids),
            image_ids=torch.from_numpy(image_ids),
            caption_ids=torch.from_numpy(caption_ids),
            rows=torch.from_numpy(batch.rows),
            weights=torch.from_numpy(batch.weights),
        )

    def batch_bytes(self, batch: MicroBatch) -> int:
        """Bytes of the images of a batch, which outweigh all else."""
        return len(batch.sample_ids) * 3 * self.store.manifest.image_size**2


class _Requests(Sampler):
    """The rank's micro-batches from ``start`` on; DataLoader sends them to its workers one by one."""

    def __init__(self, plan: Plan, start: DataPosition, rank: int, world_size: int) -> None:
        self.plan, self.start, self.rank, self.world_size = plan, start, rank, world_size

    def __iter__(self) -> Iterator[MicroBatch]:
        position = self.start
        while True:
            yield from self.plan.step(position, self.rank, self.world_size)
            position = self.plan.after(position)


def check_shared_memory(workers: int, batch_bytes: int, folder: str = "/dev/shm") -> None:
    """Compare what prefetched batches need with what is free: workers beyond it die of a bus error."""
    if not os.path.isdir(folder):
        return
    needed = workers * (_PREFETCH + 1) * batch_bytes
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder} has {free / 2**20:.0f} MiB free, but {workers} workers prefetch "
            f"{needed / 2**20:.0f} MiB; use fewer --workers (0 needs none), a smaller micro-batch, "
            "or a larger /dev/shm (docker --shm-size)"
        )


def _empty(shape: tuple[int, ...]) -> Tensor:
    """Allocate uint8 where it need not be copied again.

    In a worker that is shared memory, as torch's own collate function has it. Elsewhere it is NumPy's,
    which asks for huge pages: the page faults of ``torch.empty`` can cost more than the copy itself.
    """
    if get_worker_info() is None:
        return torch.from_numpy(np.empty(shape, dtype=np.uint8))
    storage: Any = torch.UntypedStorage._new_shared(int(np.prod(shape)))
    tensor: Any = torch.empty(0, dtype=torch.uint8)
    return tensor.set_(storage, 0, shape)


def _first_lost(workers: Sequence[Any]) -> int | None:
    """Exit code of a worker that has ended or is about to: its pipe breaks shortly before the process is gone."""
    multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=1)
    return next((worker.exitcode for worker in workers if worker.exitcode), None)


def _end_of(exit_code: int) -> str:
    if exit_code > 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    why = {"SIGKILL": " (out of host memory?)", "SIGBUS": " (/dev/shm is full?)"}.get(name, "")
    return f"was killed by {name}{why}"


def _start_worker(_: int) -> None:
    follow_parent()
    torch.set_num_threads(1)


def _as_it_is(batch: RawBatch) -> RawBatch:
    return batch
