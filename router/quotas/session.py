"""A call's reservation of tokens, and a router's session with the ledger.

The session ends reservations in the background, and tells them again to a ledger that has lost data. Every second it
renews them, and saves the accounts that its calls have changed in the adapter store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import msgspec
from loraplex.admin.v1 import accounts_pb2 as pb

from broker.connection import REDIS_DOWN
from broker.ledger import (
    Counts,
    Ledger,
    LedgerBehindError,
    LedgerClosedError,
    Reservation,
    SendReserve,
    TokenLimits,
)
from broker.terms import RECOVERY_MS
from router.catalog.store_client import StoreClient
from router.dispatch.routed_job import RoutedJob
from router.metrics import RouterMetrics
from router.quotas.usage import Facts
from rpc.errors import Aborted, CallError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

# Interval in seconds between renewals, and between saves.
RENEW_S = 1.0
# Time in seconds for which the reservation of a call that ended before its answer is held, so that it may be resumed.
LINGER_S = 5.0
# Timeout in seconds for the settling that the last message of a call waits for.
FINISH_S = 0.5
# Maximum number of tries of one reservation, while the ledger is filled and opened.
_TRIES = 4
# Time in seconds for which events of charges are kept, to add them again to a Redis that has lost them; routers write
# them to their files within a second.
_EVENTS_S = 10.0
# Interval in seconds between tries while a router stops.
_DRAIN_RETRY_S = 0.05
# Ends the name of a router in what an earlier call of a request sent, which was resumed at the same router.
_FORMER = "/former"


@dataclass(slots=True, eq=False)
class Grant:
    """The reservation of a call: of one job, or of all jobs of a call of Score, Embed or Classify."""

    reservation: Reservation
    session: LedgerSession
    # Output tokens that the client of a resumed request had.
    received: int = 0
    jobs: list[RoutedJob] = field(default_factory=list)
    # Counts the output tokens that the client got, from the request's first one; None: the call has no stream, and is
    # made again where its router dies.
    delivered: Callable[[], int] | None = None
    # Facts for the usage event; None: events are not written.
    facts: Facts | None = None
    began_at: float = field(default_factory=time.monotonic)
    _end: asyncio.Future[None] | None = None

    @property
    def id(self) -> str:
        """Return the reservation's id."""
        return self.reservation.id

    def settle(self) -> asyncio.Future[None]:
        """End it in the background; the answer is done once the ledger knows. Further ends do nothing."""
        if self._end is None:
            self._end = self.session.settle(self)
        return self._end

    def leave(self) -> None:
        """End it in the background, unless the request is resumed soon."""
        if self._end is None:
            self._end = self.session.leave(self)

    async def finish(self) -> None:
        """Settle before the client gets the last message, so that it knows of no token that is not charged.

        A Redis that does not answer delays nobody for long: then the reservation is settled later.
        """
        await asyncio.wait({self.settle()}, timeout=FINISH_S)

    def end_calls(self, error: CallError) -> None:
        """End the call of the reservation with an error."""
        for routed in self.jobs:
            routed.end_reader(error)

    def count(self, *, ended: bool = False) -> Reservation:
        """Return the reservation with what is used of it by now, as it would stand if this router died."""
        if ended or self.delivered is not None:
            computed = [one for one in self.jobs if one.first_token_at is not None or (ended and _is_given_up(one))]
            prompts = sum(len(routed.job.prompt_ids) for routed in computed)
            used_input = min(prompts + self.received, self.reservation.numbers["held_input"]) if computed else 0
            self.reservation.use(used_input, self.delivered() if self.delivered else 0)
            self.reservation.facts = self._encoded_facts()
        return self.reservation

    def _encoded_facts(self) -> str:
        if self.facts is None:
            return ""
        facts = self.facts.of_job(self.jobs[0].job) if self.jobs else self.facts
        # A resumed request has those of its beginning.
        cached = facts.cached_tokens or sum(routed.cached_tokens for routed in self.jobs)
        seconds = time.monotonic() - self.began_at
        return msgspec.structs.replace(facts, cached_tokens=cached, seconds=round(seconds, 4)).encode()


def _is_given_up(routed: RoutedJob) -> bool:
    """Return whether a job's client left while a worker computed its prompt, which is charged then."""
    return routed.claimed_at is not None and routed.failure is None and routed.reader.error is None


class LedgerSession:
    """The reservations of one router. Without a store a Redis that loses its data is told what the router knows."""

    def __init__(self, ledger: Ledger, metrics: RouterMetrics, store: StoreClient | None = None) -> None:
        self.ledger = ledger
        self._metrics = metrics
        self._store = store
        self._grants: dict[str, Grant] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._lingering: set[asyncio.Task[None]] = set()
        self._recovering: asyncio.Task[None] | None = None
        self._events: deque[tuple[float, Sequence[bytes]]] = deque()
        # Set when the ledger answers, for ends that wait for that.
        self._answers = asyncio.Event()
        self._last_logged = ""

    async def reserve(
        self, grant: Grant, received: int | None, limits: Mapping[str, TokenLimits], send: SendReserve | None
    ) -> None:
        """Reserve what a grant asks for. Raises as Ledger.reserve does, and Unavailable."""
        for _ in range(_TRIES):
            try:
                await self.ledger.reserve(grant.reservation, received, limits, send)
            except LedgerBehindError as error:
                await self._recover(error.epoch)
            except LedgerClosedError as error:
                await asyncio.sleep(error.wait_ms / 1e3)
            else:
                self._grants[grant.id] = grant
                return
        raise Unavailable("the ledger of quotas lost data again and again", reason="LEDGER_BEHIND")

    def settle(self, grant: Grant) -> asyncio.Future[None]:
        """End a reservation in the background; the answer is done once the ledger knows."""
        return self._start(self._settle(grant), self._settling)

    def leave(self, grant: Grant) -> asyncio.Future[None]:
        """End a reservation in LINGER_S, unless the request is resumed; its place among the streams is free at once."""
        grant.reservation.streams = 0
        self._grants.setdefault(grant.id, grant)
        return self._start(self._linger(grant), self._lingering)

    def _start(self, work: Awaitable[None], tasks: set[asyncio.Task[None]]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def _settle(self, grant: Grant) -> None:
        reservation = grant.count(ended=True)
        is_former = self._grants.setdefault(grant.id, grant) is not grant  # a later call has taken the request over
        try:
            router = self.ledger.router + _FORMER if is_former else ""
            event = await self._tell(lambda: self.ledger.settle(reservation, router))
        finally:
            if self._grants.get(grant.id) is grant:
                del self._grants[grant.id]
        now = time.monotonic()
        while self._events and self._events[0][0] < now - _EVENTS_S:
            self._events.popleft()
        if event:
            self._events.append((now, event))

    async def _linger(self, grant: Grant) -> None:
        reservation = grant.count(ended=True)
        await self._tell(lambda: self.ledger.renew([reservation]))
        await asyncio.sleep(LINGER_S)
        await self._settle(grant)

    async def _tell(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call until the ledger has answered it."""
        while True:
            try:
                return await call()
            except LedgerClosedError as error:
                await asyncio.sleep(error.wait_ms / 1e3)
            except LedgerBehindError as error:
                if not await self._is_recovered(error.epoch):
                    await self._answer()
            except REDIS_DOWN:
                await self._answer()

    async def _answer(self) -> None:
        self._answers.clear()
        await self._answers.wait()

    async def _is_recovered(self, epoch: int) -> bool:
        try:
            await self._recover(epoch)
        except (*REDIS_DOWN, CallError) as error:
            if str(error) != self._last_logged:
                log.warning("the ledger has lost data and is not filled yet: %s", error)
            self._last_logged = str(error)
            return False
        self._last_logged = ""
        return True

    async def _recover(self, epoch: int) -> None:
        """Tell a ledger that has another epoch what this router knows; calls at the same time share it."""
        if self._recovering is None:
            self._recovering = asyncio.create_task(self._fill_and_join(epoch))
            self._recovering.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._recovering)

    async def _fill_and_join(self, epoch: int) -> None:
        ledger = self.ledger
        has_lost = ledger.epoch != 0
        try:
            # The router that has filled it may have read the store before this one saved its charges.
            unsaved = list(ledger.unsaved.values())
            saved = await self._saved() if has_lost or not epoch else []
            counts = [*saved, *unsaved, *ledger.unsaved.values()]
            await ledger.fill(counts)
            await ledger.join(RECOVERY_MS if counts or has_lost else 0, [one.count() for one in self._grants.values()])
            await ledger.report([event for _, event in self._events])
        finally:
            self._recovering = None
        if has_lost:
            self._metrics.ledger_refills.inc()
            log.warning("Redis lost data of the ledger; it was filled with %d accounts", len(counts))

    async def _saved(self) -> list[Counts]:
        if self._store is None:
            return []
        return [Counts(*(getattr(one, name) for name in Counts.__slots__)) for one in await self._store.accounts()]

    async def renew(self) -> None:
        """Renew the reservations, with what is used of them by now, and end calls whose request another router has."""
        grants = dict(self._grants)
        changed = [one for one in (grant.count() for grant in grants.values()) if one.now != one.renewed]
        try:
            ended, moved = await self.ledger.renew(changed)
        except LedgerBehindError as error:
            await self._is_recovered(error.epoch)
            return
        except LedgerClosedError:
            return
        except REDIS_DOWN:
            return
        self._answers.set()
        self._metrics.reservations_expired.inc(ended)
        for name in moved:
            if (grant := grants.get(name)) is not None and self._grants.get(name) is grant:
                grant.end_calls(Aborted("another router goes on with the request", reason="TAKEN_OVER"))

    async def save(self) -> None:
        """Save the accounts that calls of this router have changed; a store that does not answer gets them later."""
        unsaved = dict(self.ledger.unsaved)
        if self._store is None or not unsaved:
            return
        try:
            await self._store.save_accounts([pb.Account(**asdict(one)) for one in unsaved.values()])
        except CallError as error:
            if error.message != self._last_logged:
                log.warning("accounts of quotas wait to be saved: %s", error.message)
            self._last_logged = error.message
            return
        for name, counts in unsaved.items():
            if self.ledger.unsaved.get(name) is counts:
                del self.ledger.unsaved[name]

    async def follow(self, is_used: Callable[[], bool]) -> None:
        """Renew and save every second, while the ledger is used; never returns."""

        async def every_second(work: Callable[[], Awaitable[None]]) -> None:
            while True:
                if is_used():
                    await work()
                await asyncio.sleep(RENEW_S)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(every_second(self.renew))
            tasks.create_task(every_second(self.save))

    async def drain(self, timeout_s: float) -> None:
        """Settle what has ended, up to a timeout, and save; what is not settled then is ended by other routers."""
        for task in self._lingering:
            task.cancel()
        until = time.monotonic() + timeout_s
        while (tasks := {*self._settling, *self._lingering}) and time.monotonic() < until:
            await asyncio.wait(tasks, timeout=_DRAIN_RETRY_S)
            await self.renew()
        for task in self._settling:
            task.cancel()
        await self.renew()
        await self.save()
