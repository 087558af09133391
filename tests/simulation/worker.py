"""A worker: the real engine session (intake, relay, presence, drain) over a simulated engine, queue and network."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.admin.v1 import tenants_pb2
from loraplex.contracts.artifacts.base_model import BaseModel, read_base_model
from loraplex.contracts.broker.messages import AdapterRef, AdapterRequest, AdapterTiers
from loraplex.runtime.telemetry.tracing import Spans
from loraplex.worker.engine_api import Failure, Removal
from loraplex.worker.io.adapters.fetch import FetchFailedError, WeightedSets
from loraplex.worker.io.app import EngineSession, run_sessions
from loraplex.worker.io.engine_client import EngineBreaker
from loraplex.worker.io.metrics import WorkerMetrics
from loraplex.worker.io.results import JobTelemetry
from loraplex.worker.io.settings import WorkerSettings
from loraplex.worker.ipc import Configure
from tests.simulation.engine import SimulatedEngine
from tests.simulation.loop import NODE, Node
from tests.simulation.network import Network
from tests.simulation.options import CHECKS, INVOCATION
from tests.simulation.redis import SimulatedRedis

# Range of the seconds that a fetch takes.
_FETCH_S = (0.0, 0.15)


class _Store:
    """The stub of the adapter store, as far as an engine session calls it."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base

    def stub(self, kind: object) -> _Store:
        """Return the stub of a service, as a channel does."""
        return self

    async def ListGoneRevisions(self, request: object, **_: object) -> tenants_pb2.ListGoneRevisionsResponse:
        """Return none: no adapter is removed."""
        return tenants_pb2.ListGoneRevisionsResponse()

    async def GetBaseModel(self, request: pb.GetBaseModelRequest, **_: object) -> pb.GetBaseModelResponse:
        """Return the one model."""
        return pb.GetBaseModelResponse(model=pb.BaseModel(name=self._base.name, digest=self._base.digest))


class _Disk:
    """No revision is on it when a worker starts, and none is noted."""

    digests = frozenset[str]()

    async def forget(self, gone: Collection[str]) -> Removal:
        """See AdapterDisk."""
        return Removal()


class SimulatedFetcher:
    """Stands in for loraplex.worker.io.adapters.fetch.AdapterFetcher: each revision is the same files."""

    disk = _Disk()

    def __init__(self, chance: Random, base: BaseModel, directory: Path) -> None:
        self.store = self.channel = _Store(base)
        self._chance = chance
        self._directory = directory
        self.pins = 0
        self.sets = WeightedSets()
        # True while the worker does not reach the store, and since then until a fetch succeeds.
        self.cut_off = self.fails = False

    async def probe(self) -> None:
        """See AdapterFetcher."""
        self.fails = self.cut_off

    @property
    def stats(self) -> AdapterTiers:
        """See AdapterFetcher."""
        return AdapterTiers()

    def disk_pin(self) -> SimulatedPin:
        """See AdapterFetcher."""
        return SimulatedPin(self)

    def prefetch(self, requests: Iterable[AdapterRequest]) -> None:
        """Do nothing: no fetch would end earlier."""

    async def get(self) -> Path:
        """Return the files, after a while."""
        await asyncio.sleep(self._chance.uniform(*_FETCH_S))
        self.fails = self.cut_off
        if self.cut_off:
            raise FetchFailedError(Failure("UNAVAILABLE", "STORE_DOWN", "the worker is cut off", "adapter"))
        return self._directory


class SimulatedPin:
    """Stands in for loraplex.worker.io.adapters.fetch.DiskPin."""

    def __init__(self, fetcher: SimulatedFetcher) -> None:
        self._fetcher = fetcher
        self._pins = 0

    async def fetch(self, refs: Sequence[AdapterRef], tenant: str) -> list[Path]:
        """See DiskPin."""
        self._pins += len(refs)
        self._fetcher.pins += len(refs)
        return await asyncio.gather(*(self._fetcher.get() for _ in refs))

    async def invocation_of(self, digest: str) -> tuple[int, ...]:
        """See DiskPin."""
        return INVOCATION if digest == CHECKS.digest else ()

    def release(self) -> None:
        """See DiskPin."""
        self._fetcher.pins -= self._pins
        self._pins = 0


class SimulatedHealth:
    """Stands in for loraplex.runtime.rpc.server.Server."""

    serving = False

    async def set_serving(self, serving: bool) -> None:
        """See Server."""
        self.serving = serving


class SimulatedWorker:
    """A worker's machine. Its processes die and are started again; `node` is the present I/O process."""

    def __init__(
        self, name: str, settings: WorkerSettings, redis: SimulatedRedis, network: Network, fetcher: SimulatedFetcher
    ) -> None:
        self.name = name
        self._settings = settings
        self._base = read_base_model(settings.model)
        self.redis = redis
        self._network = network
        self.fetcher = fetcher
        self.health = SimulatedHealth()
        self._telemetry = JobTelemetry(WorkerMetrics(), Spans(), name)
        self.engine: SimulatedEngine | None = None
        self.start()

    def start(self) -> None:
        """Start a new I/O process."""
        self.node = Node(self.name, self)
        self.fetcher.pins, self.fetcher.sets = 0, WeightedSets()
        self._stop = asyncio.Event()
        self.running = self.node.start(self._run())

    async def _run(self) -> None:
        # loraplex.worker.io.app.run, without what reads files and binds ports.
        redis, fetcher, health = cast(Any, (self.redis.client, self.fetcher, self.health))
        breaker = EngineBreaker()
        await run_sessions(
            lambda: EngineSession(self._settings, self._base, redis, fetcher, health, self._telemetry, breaker),
            self._stop,
            self._telemetry.metrics,
        )

    def kill(self, *, silently: bool = False) -> None:
        """Kill both processes by SIGKILL; `silently`: the whole machine is gone, and no peer is told."""
        self.node.kill()
        if self.engine is not None:
            self.engine.node.kill()
        if not silently:
            self._network.lost(self.node)
            self.redis.lost(self.node)

    def freeze(self) -> None:
        """Stop both processes by SIGSTOP."""
        self.node.frozen = True
        if self.engine is not None:
            self.engine.node.frozen = True

    def wake(self) -> None:
        """Continue both processes by SIGCONT."""
        self.node.wake()
        if self.engine is not None:
            self.engine.node.wake()

    def drain(self) -> None:
        """Tell the worker to stop, by SIGTERM."""
        self.node.call(self._stop.set)


async def start_engine(configure: Configure) -> SimulatedEngine:
    """Start an engine, as EngineProcess.start does, in the worker whose code is running."""
    node = NODE.get()
    assert node is not None, "only workers start engines"
    worker = node.owner
    assert isinstance(worker, SimulatedWorker)
    worker.engine = SimulatedEngine(configure)
    return worker.engine
