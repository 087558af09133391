"""What the worker's tests share: engines that are closed, runs to the end, loads that finish when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from worker.lora.cache import AdapterCache
from worker.scheduling.contract import AdapterSource

if TYPE_CHECKING:
    from worker.engine import TorchEngine
    from worker.scheduling.contract import NewSequence, Output


@pytest.fixture
def make_engine(one_thread: None) -> Iterator[Callable[..., TorchEngine]]:
    """Call with (directory, **settings): an engine of the CPU in float32, closed after the test."""
    from worker.engine import build_engine

    engines = []

    def make(directory: Path, **settings: Any) -> TorchEngine:
        engine = build_engine(str(directory), "cpu", settings.pop("dtype", "float32"), **settings)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def run_until_idle(
    engine: TorchEngine, arrivals: dict[int, list[NewSequence]], after_step: Callable[[int], None] = lambda _: None
) -> dict[str, list[Output]]:
    """Step until nothing is left; `arrivals` are the sequences added before each step number. Outputs by sequence.

    Asserts that every sequence ends once, without gaps, and that nothing is held afterwards.
    """
    import time

    outputs: dict[str, list[Output]] = {one.sequence_id: [] for some in arrivals.values() for one in some}
    arrivals = dict(arrivals)
    number = 0
    give_up_at = time.monotonic() + 60
    while arrivals or not all(some and some[-1].finish for some in outputs.values()):
        for sequence in arrivals.pop(number, []):
            engine.add(sequence)
        for output in engine.step():
            before = outputs[output.sequence_id]
            assert not before or (before[-1].finish is None)
            assert not before or output.offset == before[-1].offset + len(before[-1].token_ids)
            before.append(output)
        after_step(number)
        number += 1
        assert time.monotonic() < give_up_at, "the engine does not come to an end"
    stats = engine.stats()
    assert (stats.rows_running, stats.rows_waiting, stats.blocks_referenced, stats.slots_pinned) == (0, 0, 0, 0)
    return outputs


@pytest.fixture(name="run_until_idle")
def run_until_idle_fixture() -> Callable[..., dict[str, list[Output]]]:
    """The function of this name: test modules can't import a conftest."""
    return run_until_idle


class GatedLoads:
    """A real adapter cache whose loads end when the test says so. An adapter is its digest; those in `broken` fail."""

    def __init__(self, slots: int, broken: frozenset[str] = frozenset()) -> None:
        self.broken = broken
        # What lies in each slot, as `install` left it.
        self.installed: dict[int, str] = {}
        self._gate = threading.Semaphore(0)
        self._news = threading.Semaphore(0)
        self.cache = AdapterCache(slots, self._prepare, self._install, self._news.release)

    def loading(self) -> bool:
        """Whether the loader thread has anything in hand."""
        return len(self.cache._loading) > self.cache._results.qsize()

    def finish_load(self) -> None:
        """Let the oldest load end, and wait until it has."""
        before = self.cache._results.qsize()
        self._gate.release()
        while self.cache._results.qsize() == before:
            assert self._news.acquire(timeout=10), "the loader thread does not answer"

    def close(self) -> None:
        """End the loader thread."""
        self._gate.release(1000)
        self.cache.close()

    def _prepare(self, source: AdapterSource) -> str:
        self._gate.acquire()
        if source.digest in self.broken:
            raise OSError(f"{source.directory} is broken")
        return source.digest

    def _install(self, prepared: str, slot: int) -> None:
        self.installed[slot] = prepared


@pytest.fixture(scope="session")
def gated_loads() -> type[GatedLoads]:
    """The class; hypothesis wants a fresh one for every example."""
    return GatedLoads
