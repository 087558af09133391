"""What operators ask of this worker: to drain, and which adapters to have on its device.

    commands, pins of the cell ──▶ obey ──▶ one task an adapter: fetch to the disk ──▶ engine: Warm | Pin
                                                    └ the disk keeps it: of a pin until it is unpinned, of a warm one
                                                      until the engine has it

A slow store delays no other command, and nothing outlives the incarnation: the next one reads the cell's pins again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.commands import Command, Verb
from broker.connection import REDIS_DOWN
from broker.messages import AdapterRef, AdapterRequest
from broker.pins import is_let_go
from broker.queue import JobQueue
from worker.io.adapters.fetch import AdapterFetcher, DiskPin, FetchFailedError
from worker.io.adapters.source import fetch_source
from worker.io.engine_client.process import EngineProcess
from worker.ipc import Pin, PinRefused, Unpin, Warm

log = logging.getLogger(__name__)

# Below the time after which a connection that says nothing counts as lost.
WAIT_S = 2.0
PAUSE_S = 0.5
# So long an adapter may wait for a slot that nobody needs.
WARM_S = 60.0
# After the store did not have a pinned one.
FETCH_AGAIN_S = 2.0


@dataclass(slots=True, eq=False)
class _Order:
    request: AdapterRequest
    stays: bool
    hold: DiskPin
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class OperatorCommands:
    """One incarnation's. `max_rank` is what its engine takes."""

    def __init__(self, queue: JobQueue, engine: EngineProcess, fetcher: AdapterFetcher, max_rank: int) -> None:
        self._queue = queue
        self._engine = engine
        self._fetcher = fetcher
        self._max_rank = max_rank
        self._orders: dict[str, _Order] = {}
        # Digests of those that are to come to the device, and need not stay.
        self._awaited: set[str] = set()

    async def obey(self, incarnation: str, stop: asyncio.Event) -> None:
        """Forever: pin what the cell has pinned, then take commands. A drain is what SIGTERM is: it sets `stop`."""
        pins_known = False
        while True:
            try:
                if not pins_known:
                    for request in await self._queue.pins.list():
                        self._begin(request, stays=True)
                    pins_known = True
                command = await self._queue.commands.next(incarnation, WAIT_S)
            except REDIS_DOWN as error:
                log.warning("the commands' queue does not answer: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            if command is not None:
                self._carry_out(command, stop)

    def _carry_out(self, command: Command, stop: asyncio.Event) -> None:
        match command:
            case Command(Verb.DRAIN):
                log.info("told to drain by an operator")
                stop.set()
            case Command(Verb.UNPIN, AdapterRequest(adapter)):
                self._unpin(adapter)
            case Command(verb, AdapterRequest() as request):
                self._begin(request, stays=verb is Verb.PIN)

    def resident(self, digests: Sequence[str]) -> None:
        """What the engine has on its device now."""
        for digest in self._awaited.intersection(digests) if self._awaited else ():
            self._orders[digest].arrived.set()

    def refused(self, message: PinRefused) -> None:
        """The engine does not keep it."""
        order = self._orders.get(message.digest)
        if order is not None and order.stays:
            log.warning("%s is not pinned: %s", order.request.adapter.revision, message.message)
            self._end(order)

    def _begin(self, request: AdapterRequest, *, stays: bool) -> None:
        ref = request.adapter
        if ref.rank > self._max_rank:
            log.warning("%s: rank %d; this worker takes at most %d", ref.revision, ref.rank, self._max_rank)
            return
        before = self._orders.get(ref.digest)
        if before is not None and (before.stays or not stays):
            return  # it is as asked for, or will be
        if before is not None:
            self._end(before)
        order = self._orders[ref.digest] = _Order(request, stays, self._fetcher.hold())
        order.task = asyncio.get_running_loop().create_task(self._pin(order) if stays else self._warm(order))

    def _unpin(self, ref: AdapterRef) -> None:
        for order in [one for one in self._orders.values() if one.stays and is_let_go(one.request.adapter, ref)]:
            log.info("unpins %s", order.request.adapter.revision)
            self._engine.send(Unpin(order.request.adapter.digest))
            self._end(order)

    async def _pin(self, order: _Order) -> None:
        ref = order.request.adapter
        while True:
            try:
                source = await fetch_source(order.hold, ref, order.request.tenant)
                break
            except FetchFailedError as error:
                if error.failure.code != "UNAVAILABLE":
                    log.warning("can't pin %s: %s", ref.revision, error)
                    self._end(order)
                    return
                log.warning("can't pin %s yet: %s", ref.revision, error)
                order.hold.release()
                await asyncio.sleep(FETCH_AGAIN_S)
        log.info("pins %s", ref.revision)
        self._engine.send(Pin(source))

    async def _warm(self, order: _Order) -> None:
        ref = order.request.adapter
        try:
            source = await fetch_source(order.hold, ref, order.request.tenant)
        except FetchFailedError as error:
            log.warning("can't warm %s: %s", ref.revision, error)
            self._end(order)
            return
        self._awaited.add(ref.digest)
        self._engine.send(Warm(source))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WARM_S):
                await order.arrived.wait()
        if not order.arrived.is_set():
            log.warning("%s is not warm after %g s: no slot, or it can't be loaded", ref.revision, WARM_S)
            self._engine.send(Unpin(ref.digest))  # its files may go now
        self._end(order)

    def _end(self, order: _Order) -> None:
        """Release what an order holds, and forget it."""
        digest = order.request.adapter.digest
        del self._orders[digest]
        self._awaited.discard(digest)
        order.hold.release()
        if order.task is not None and order.task is not asyncio.current_task():
            order.task.cancel()

    async def close(self) -> None:
        """End all of them; the engine is gone or will be."""
        ending = [order.task for order in self._orders.values() if order.task is not None]
        for order in list(self._orders.values()):
            self._end(order)
        await asyncio.gather(*ending, return_exceptions=True)
