"""Fixtures of the worker's tests: engines that are closed, runs to the end, loads that finish when the test says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loraplex.worker.engine.scheduling.adapter_cache import AdapterCache
from loraplex.worker.engine.scheduling.loader_threads import LoaderThreads
from loraplex.worker.engine_api import AdapterSource, EngineConfig

if TYPE_CHECKING:
    from loraplex.worker.engine.torch_engine import TorchEngine
    from loraplex.worker.engine_api import NewSequence, Output


@pytest.fixture
def ahead() -> bool:
    """Let make_engine's engines step ahead, or not; a module whose tests hold in both modes overrides it."""
    return False


@pytest.fixture
def kept_compilations(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what Triton compiles for a GPU until the next run: its key has the kernel's source and the compiler's."""
    assert pytestconfig.cache is not None
    monkeypatch.setenv("TRITON_CACHE_DIR", str(pytestconfig.cache.mkdir("triton")))


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Kernels that share out their work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_engine(one_thread: None, ahead: bool) -> Iterator[Callable[..., TorchEngine]]:
    """Call with (directory, **settings): an engine of the CPU in float32, closed after the test."""
    import torch

    from loraplex.worker.engine.torch_engine import build_engine

    engines = []

    def make(directory: Path, **settings: Any) -> TorchEngine:
        # Results of a step must not depend on the clock.
        options = {"ahead": settings.pop("ahead", ahead), "paced": settings.pop("paced", False)}
        config = EngineConfig(str(directory), dtype=settings.pop("dtype", "float32"), **settings)
        engine = build_engine(config, **options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
    torch.set_num_threads(1)


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
    give_up_at = time.process_time() + 60  # not of the clock: other processes may take the cores
    while arrivals or not all(some and some[-1].finish for some in outputs.values()):
        for sequence in arrivals.pop(number, []):
            engine.add_sequence(sequence)
        for output in engine.step():
            before = outputs[output.sequence_id]
            assert not before or (before[-1].finish is None)
            assert not before or output.offset == before[-1].offset + len(before[-1].token_ids)
            before.append(output)
        after_step(number)
        number += 1
        assert time.process_time() < give_up_at, "the engine does not come to an end"
    engine.check()
    stats = engine.stats()
    assert (stats.rows_running, stats.rows_waiting, stats.blocks_referenced, stats.slots_pinned) == (0, 0, 0, 0)
    return outputs


@pytest.fixture(name="run_until_idle")
def run_until_idle_fixture() -> Callable[..., dict[str, list[Output]]]:
    """The function of this name: test modules can't import a conftest."""
    return run_until_idle


class GatedLoads(LoaderThreads[str]):
    """A real adapter cache whose loads end when the test says so. An adapter is its digest; those in `broken` fail.

    An adapter has as many bytes as `sizes` says, or one.
    """

    transfers = False

    def __init__(
        self,
        slots: int,
        broken: frozenset[str] = frozenset(),
        *,
        host_bytes: int = 1 << 20,
        sizes: Mapping[str, int] | None = None,
        **options: Any,
    ) -> None:
        self.broken = broken
        self.sizes = sizes or {}
        # Adapter of each slot, as `install` left it, and the number of times that each was read from its files.
        self.installed: dict[int, str] = {}
        self.reads: Counter[str] = Counter()
        self._under_way: dict[str, Callable[[], str]] = {}
        self._ended: list[tuple[str, str | Exception]] = []
        self.most = 2
        self.cache = AdapterCache(slots, self, self, host_bytes, **options)

    # LoaderThreads

    def start(self, digest: str, work: Callable[[], str]) -> None:
        """See LoaderThreads."""
        assert digest not in self._under_way, "one flight per adapter"
        self._under_way[digest] = work

    def has_ended(self) -> bool:
        """See LoaderThreads."""
        return bool(self._ended)

    def ended(self) -> list[tuple[str, str | Exception]]:
        """See LoaderThreads."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """See LoaderThreads."""

    def loading(self) -> list[str]:
        """Return the loads that are under way, oldest first."""
        return list(self._under_way)

    def finish_load(self, digest: str = "") -> None:
        """Let a load end; the oldest, if none is named."""
        digest = digest or next(iter(self._under_way))
        work = self._under_way.pop(digest)
        try:
            self._ended.append((digest, work()))
        except Exception as error:
            self._ended.append((digest, error))

    # AdapterMemory

    def read(self, source: AdapterSource) -> str:
        """See AdapterMemory."""
        self.reads[source.digest] += 1
        if source.digest in self.broken:
            raise OSError(f"{source.directory} is broken")
        return source.digest

    def transfer(self, prepared: str) -> str:
        """See AdapterMemory."""
        return prepared

    def install(self, prepared: str, slot: int) -> None:
        """See AdapterMemory."""
        self.installed[slot] = prepared

    def size(self, prepared: str) -> int:
        """See AdapterMemory."""
        return self.sizes.get(prepared, 1)


@pytest.fixture(scope="session")
def gated_loads() -> type[GatedLoads]:
    """The class; a random walk wants a fresh one each time."""
    return GatedLoads
