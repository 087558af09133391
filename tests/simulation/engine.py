"""A worker's engine process: the real hash engine and scheduler, whose steps and adapter loads take virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from random import Random

from loraplex.hash_engine import HashEngine
from loraplex.worker.engine.process import BEAT_S
from loraplex.worker.engine_api import SequenceRefusedError
from loraplex.worker.io.engine_client import EngineLostError
from loraplex.worker.ipc import (
    Abort,
    Add,
    Begun,
    Configure,
    ForgetTenant,
    FromEngine,
    Loaded,
    Ready,
    Refused,
    TenantForgotten,
    ToEngine,
    Unpin,
    Warm,
    step_messages,
)
from tests.simulation.loop import NODE, Node

STEP_S = 0.02
_LOAD_S = (0.005, 0.08)
_MESSAGE_S = 0.0001


class VirtualLoads:
    """Adapter loads that take virtual time; see LoaderThreads."""

    most = 4
    chance = Random(0)

    def __init__(self, on_ended: Callable[[], None], threads: int = 4) -> None:
        self._on_ended = on_ended
        self._results: list[tuple[str, int | Exception]] = []

    def start(self, digest: str, work: Callable[[], int]) -> None:
        """See LoaderThreads."""
        asyncio.get_running_loop().call_later(self.chance.uniform(*_LOAD_S), self._end, digest, work)

    def _end(self, digest: str, work: Callable[[], int]) -> None:
        self._results.append((digest, work()))
        self._on_ended()

    def has_ended(self) -> bool:
        """See LoaderThreads."""
        return bool(self._results)

    def ended(self) -> list[tuple[str, int | Exception]]:
        """See LoaderThreads."""
        results, self._results = self._results, []
        return results

    def close(self) -> None:
        """See LoaderThreads."""


class InlineProver:
    """Stands in for grammars.prover.Prover, without a child process: all that is drawn compiles."""

    def __init__(self, size: int, special: Mapping[int, str]) -> None:
        """Take what Prover takes."""

    def known(self, grammar: str, tenant: str = "") -> bool:
        """See Prover."""
        return True

    def prove(self, grammar: str, path: str = "", tenant: str = "") -> None:
        """See Prover."""

    def forget(self) -> int:
        """See Prover."""
        return 0

    def close(self) -> None:
        """See Prover."""


class SimulatedEngine:
    """Stands in for loraplex.worker.io.engine_client.EngineProcess. `node` is the engine's own process."""

    pid = 0

    def __init__(self, configure: Configure) -> None:
        parent = NODE.get()
        assert parent is not None, "only workers start engines"
        self.node = Node(f"{parent.name}'s engine")
        self._heard_at, self._expected = asyncio.get_running_loop().time(), False
        self.stalled = self.compiling = False
        # Factor by which steps take longer on a busy processor.
        self.slowness = 1.0
        self._inbox: list[ToEngine] = []
        self._woken = asyncio.Event()
        self._outbox: asyncio.Queue[FromEngine | None] = asyncio.Queue()
        self.engine = HashEngine(configure.config, self._woken.set, lambda name: self._tell(Begun(name)))
        self.node.start(self._run())

    async def _run(self) -> None:
        engine, stats, beat = self.engine, self.engine.stats(), False
        self._outbox.put_nowait(Ready(engine.limits, stats))
        while True:
            self._woken.clear()
            messages, self._inbox = self._inbox, []
            for message in messages:
                self._apply(message)
            if engine.has_work():
                await asyncio.sleep(STEP_S * self.slowness)
            outputs, now = engine.step(), engine.stats()
            if outputs or beat or now != stats:
                self._tell(*step_messages(outputs, now))
                stats = now
            self._tell(*(Loaded(digest, error) for digest, error in engine.adapters.ended_commands()))
            beat = False
            if not engine.has_work() and not self._inbox:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), BEAT_S)
                beat = not self._inbox
                if beat:
                    engine.check()

    def _apply(self, message: ToEngine) -> None:
        match message:
            case Add(sequences):
                for sequence in sequences:
                    try:
                        self.engine.add_sequence(sequence)
                    except SequenceRefusedError as error:
                        self._tell(Refused(sequence.sequence_id, error.field, error.message))
            case Abort(sequence_ids):
                for sequence_id in sequence_ids:
                    self.engine.abort(sequence_id)
            case Warm(adapter):
                self.engine.adapters.warm_adapter(adapter)
            case Unpin(digest):
                self.engine.adapters.unpin_adapter(digest)
            case ForgetTenant(tenant, kept_adapters):
                self._tell(TenantForgotten(dict(self.engine.forget_tenant(tenant, kept_adapters))))

    def _tell(self, *messages: FromEngine) -> None:
        """Send messages that arrive in this order; timers of one time run in any order."""

        def arrive() -> None:
            for message in messages:
                self._outbox.put_nowait(message)

        asyncio.get_running_loop().call_later(_MESSAGE_S, arrive)

    # Methods that the I/O process calls

    async def ready(self) -> Ready:
        """See EngineProcess."""
        async for message in self.messages():
            if isinstance(message, Ready):
                return message
        raise AssertionError

    def send(self, message: ToEngine) -> None:
        """See EngineProcess."""
        if not self.node.dead:
            self._inbox.append(message)
            self.node.call(self._woken.set)

    async def messages(self) -> AsyncIterator[FromEngine]:
        """See EngineProcess."""
        while True:
            message = await self._outbox.get()
            if message is None:
                raise EngineLostError("the engine process ended")
            self._heard_at, self._expected = asyncio.get_running_loop().time(), False
            yield message

    def silent_s(self) -> float:
        """See EngineProcess."""
        return (asyncio.get_running_loop().time() - self._heard_at) / self.slowness

    def expect(self) -> None:
        """See EngineProcess."""
        if not self._expected:
            self._heard_at, self._expected = asyncio.get_running_loop().time(), True

    def kill(self) -> None:
        """See EngineProcess."""
        if not self.node.dead:
            self.node.kill()
            self._outbox.put_nowait(None)

    async def stop(self) -> None:
        """See EngineProcess."""
        self.kill()
