"""An ordered map over worker processes that survives the death of a worker."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

_IN_FLIGHT_PER_WORKER = 3


class OrderedPool(Generic[Item, Outcome]):
    """Maps batches of items to lists of outcomes, in order, with a bounded number of batches in flight.

    A worker that dies (a decoder's segmentation fault, the kernel's out-of-memory killer) takes its whole
    pool with it. Then the batches in flight are done again one at a time, and the batch that kills its
    worker again item by item; ``crashed(item)`` gives the outcome of the item that did it.
    """

    def __init__(
        self,
        function: Callable[[Sequence[Item]], list[Outcome]],
        crashed: Callable[[Item], Outcome],
        *,
        workers: int,
        initializer: Callable[..., None],
        arguments: tuple[Any, ...],
    ) -> None:
        self.function = function
        self.crashed = crashed
        self.workers = workers
        self.initializer = initializer
        self.arguments = arguments
        self.executor = self._start(workers)

    def map(self, batches: Iterable[Sequence[Item]]) -> Iterator[list[Outcome]]:
        """Give the outcomes of each batch, in the order of the batches."""
        pending: deque[tuple[Sequence[Item], Future[list[Outcome]]]] = deque()
        for batch in batches:
            pending.append((batch, self.executor.submit(self.function, batch)))
            while len(pending) >= self.workers * _IN_FLIGHT_PER_WORKER:
                yield self._first(pending)
        while pending:
            yield self._first(pending)

    def close(self) -> None:
        """End the workers; what is in flight is dropped."""
        processes = list((self.executor._processes or {}).values())
        self.executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()  # they ignore SIGTERM, hold nothing, and write nothing
            process.join()

    def _first(self, pending: deque[tuple[Sequence[Item], Future[list[Outcome]]]]) -> list[Outcome]:
        batch, future = pending.popleft()
        try:
            return future.result()
        except BrokenProcessPool:
            later = [batch for batch, _ in pending]
            outcome = self._carefully(batch)
            pending.clear()
            self._restart(self.workers)
            # Done one at a time too: any of them may be the killer.
            for batch in later:
                done: Future[list[Outcome]] = Future()
                done.set_result(self._carefully(batch))
                pending.append((batch, done))
            self._restart(self.workers)
            return outcome

    def _carefully(self, batch: Sequence[Item]) -> list[Outcome]:
        try:
            self._restart(1)
            return self.executor.submit(self.function, batch).result()
        except BrokenProcessPool:
            if len(batch) == 1:
                return [self.crashed(batch[0])]
        return [outcome for item in batch for outcome in self._carefully([item])]

    def _restart(self, workers: int) -> None:
        self.executor.shutdown(wait=True, cancel_futures=True)
        self.executor = self._start(workers)

    def _start(self, workers: int) -> ProcessPoolExecutor:
        # spawn: the packer may run inside train.py, where forking would copy locks that threads hold
        return ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), initializer=self.initializer, initargs=self.arguments
        )
