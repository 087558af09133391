"""Threads that work beside the steps: several load adapters, so that a slow load delays no other, one compiles."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

P = TypeVar("P")
# Number of threads that load adapters.
LOADERS = 4


class LoaderThreads(Generic[P]):
    """Work that goes on beside the steps; all calls come from the step thread.

    `on_ended` is called from one of the threads when `ended` has news. Each thread calls `prepare` before it does
    anything else, and before the constructor returns.
    """

    def __init__(
        self, on_ended: Callable[[], None], threads: int = LOADERS, prepare: Callable[[], None] = lambda: None
    ) -> None:
        # Number of works that are done at once; others wait.
        self.most = threads
        self._on_ended = on_ended
        self._results: queue.SimpleQueue[tuple[str, P | Exception]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(threads, "adapter-loader", prepare)
        prepared = threading.Barrier(threads + 1)
        for _ in range(threads):
            self._pool.submit(prepared.wait)
        prepared.wait()

    def start(self, digest: str, work: Callable[[], P]) -> None:
        """Start a work, whose result `ended` then returns."""
        self._pool.submit(self._run, digest, work)

    def has_ended(self) -> bool:
        """Tell whether `ended` would return any result."""
        return not self._results.empty()

    def ended(self) -> list[tuple[str, P | Exception]]:
        """Return the results since the last call, in the order in which the works ended."""
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def close(self) -> None:
        """End the threads, after what is under way."""
        self._pool.shutdown()

    def _run(self, digest: str, work: Callable[[], P]) -> None:
        try:
            self._results.put((digest, work()))
        except Exception as error:  # any: it belongs to this adapter alone
            self._results.put((digest, error))
        self._on_ended()
