"""Threads that work beside the steps: several load adapters, so that a slow load delays no other, one compiles."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

P = TypeVar("P")
# Number of threads that load adapters.
LOADERS = 4


class Loads(Protocol[P]):
    """Work that goes on beside the steps; all calls come from the step thread."""

    @property
    def most(self) -> int:
        """Return how many works are done at once; others wait."""

    def start(self, digest: str, work: Callable[[], P]) -> None:
        """Start a work, whose result `ended` then returns."""

    def has_ended(self) -> bool:
        """Tell whether `ended` would return any result."""

    def ended(self) -> list[tuple[str, P | Exception]]:
        """Return the results since the last call, in the order in which the works ended."""

    def close(self) -> None:
        """End the threads, after what is under way."""


class LoaderThreads(Generic[P]):
    """Loads in threads; `on_ended` is called from one of them when `ended` has news.

    Each thread calls `prepare` before it does anything else, and before the constructor returns.
    """

    def __init__(
        self, on_ended: Callable[[], None], threads: int = LOADERS, prepare: Callable[[], None] = lambda: None
    ) -> None:
        self.most = threads
        self._on_ended = on_ended
        self._prepare = prepare
        self._prepared = threading.Barrier(threads + 1)
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], P]] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[str, P | Exception]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"adapter-loader-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        self._prepared.wait()

    def start(self, digest: str, work: Callable[[], P]) -> None:
        """See Loads."""
        self._jobs.put((digest, work))

    def has_ended(self) -> bool:
        """See Loads."""
        return not self._results.empty()

    def ended(self) -> list[tuple[str, P | Exception]]:
        """See Loads."""
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def close(self) -> None:
        """See Loads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        self._prepare()
        self._prepared.wait()
        while (job := self._jobs.get()) is not None:
            digest, work = job
            del job  # the work holds an adapter's memory
            result: P | Exception
            try:
                result = work()
            except Exception as error:  # any: it belongs to this adapter alone
                result = error
            self._results.put((digest, result))
            del work, result
            self._on_ended()
