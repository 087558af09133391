"""The queue of one cell: enqueue, claim, charge, finish, and the wake-up that spares workers from polling.

Each operation is one atomic function of broker/lua; the arguments are listed here as the function reads them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import DecodeError
from redis.asyncio import Redis, RedisCluster
from redis.exceptions import OutOfMemoryError

from loraplex.contracts.broker.claims import ClaimMemory, Claims, packed_reports
from loraplex.contracts.broker.commands import CommandQueue, PinnedAdapters
from loraplex.contracts.broker.functions import LIBRARY, BatchedFunction, Library
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.ledger import Asked, Reservation
from loraplex.contracts.broker.messages import Capacity, DeadJob, Job, decode_record, encode_record
from loraplex.contracts.broker.terms import (
    Claimed,
    Entry,
    Placement,
    QueueLimits,
    QueueLoad,
    QueueState,
    UsageReport,
)
from loraplex.runtime.rpc.shares import FairTurns

if TYPE_CHECKING:
    from loraplex.contracts.broker.seals import Seals

log = logging.getLogger(__name__)

# Maximum usage reports, and maximum jobs or dead letters, of one function: it stops the whole server while it runs.
CHARGES_AT_ONCE = 64
LOOKS_AT_ONCE = 256
# Maximum bytes of the jobs that have begun, redispatched or resumed, in a Redis that is out of memory.
BEGUN_BYTES_WHEN_FULL = 1 << 26

# Maximum number and bytes of the dead letters of a cell.
DEAD_LIMIT = 1_000
DEAD_BYTES = 1 << 20
# Index of the argument of broker/lua/enqueue.lua that is empty unless Redis is full.
_WHEN_FULL = 3
# Maximum prompt and emitted tokens of a job whose entry is made on the event loop, in about a millisecond.
SHORT_TOKENS = 16_384
# Maximum prompt tokens of a job that goes to Redis together with what it asks the ledger for: where that is refused,
# Redis has read the job for nothing.
ADMITTED_TOKENS = 4096


class QueueFullError(Exception):
    """A limit of the queue is reached: this tenant's or API key's, or that of all."""

    def __init__(self, message: str, tenant: str = "", key: str = "") -> None:
        super().__init__(message)
        self.tenant = tenant
        self.key = key


class RedisFullError(QueueFullError):
    """Redis is out of memory."""


class QuarantinedError(Exception):
    """The tenant's jobs, or those with this adapter, are refused for `left_ms` more."""

    def __init__(self, left_ms: int) -> None:
        super().__init__(
            f"jobs of this tenant and adapter kept killing engines; refused for {left_ms / 1e3:.0f} s more"
        )
        self.left_ms = left_ms


class DeadlineUnattainableError(Exception):
    """The tenant's own jobs before this one take longer than its deadline, at the tenant's share of the workers."""

    def __init__(self, wait_ms: int) -> None:
        super().__init__(f"about {wait_ms / 1e3:.0f} s until its turn")
        self.wait_ms = wait_ms


class DeadLetters:
    """A list of dead letters in Redis, bounded in count and bytes."""

    def __init__(self, redis: Redis, keys: Keys, *, limit: int = DEAD_LIMIT, bytes_limit: int = DEAD_BYTES) -> None:
        self._redis = redis
        self._key = keys.dead
        self._limits = (limit, bytes_limit)

    async def push(self, dead: DeadJob) -> None:
        """Keep a dead letter; a repeated call keeps it once."""
        await LIBRARY.function(self._redis, "dead_push")(self._key, [encode_record(dead), *self._limits])

    async def list(self) -> list[DeadJob]:
        """Return all dead letters, the newest first."""
        return [dead for _, dead in await self.records()]

    async def records(self) -> Sequence[tuple[bytes, DeadJob]]:
        """Return the dead letters with their bytes in Redis, the newest first."""
        records: list[tuple[bytes, DeadJob]] = []
        for data in cast(list[bytes], await self._redis.lrange(self._key, 0, -1)):
            try:
                records.append((data, decode_record(DeadJob, data)))
            except DecodeError:  # another version wrote it
                log.warning("cannot read a dead letter of %d bytes", len(data))
        return records


@dataclass(frozen=True, slots=True)
class RemovedRecords:
    """The numbers of records that a removal found: waiting jobs, pins, and the others under the tenant's name."""

    jobs: int = 0
    pins: int = 0
    others: int = 0


class JobQueue:
    """The queue of a cell: a router uses it with its limits, a worker with its id."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        *,
        limits: QueueLimits | None = None,
        worker_id: str = "",
        library: Library = LIBRARY,
        memory: ClaimMemory | None = None,
        seals: Seals | None = None,
    ) -> None:
        self._redis = redis
        self.keys = keys
        self.dead = DeadLetters(redis, keys)
        self.commands = CommandQueue(redis, keys, seals)
        self.pins = PinnedAdapters(redis, keys, seals)
        self._seals = seals
        self._limits = limits or QueueLimits()
        self._worker_id = worker_id
        self._claims = Claims(redis, keys, worker_id, library, memory or ClaimMemory(), seals)
        self._turns = FairTurns(1)
        self._looks = 0
        self._library = library
        self._enqueue = BatchedFunction(redis, library.function(redis, "enqueue"), keys.waiting)
        self._admit = BatchedFunction(redis, library.function(redis, "admit"), keys.waiting)
        self._finish = BatchedFunction(redis, library.function(redis, "finish"), keys.waiting)
        self._renew = BatchedFunction(redis, library.function(redis, "renew_job"))

    async def _answer_of(self, name: str, *arguments: Any) -> Any:
        """Return the answer of a function of broker/lua, whose first argument is the prefix of the cell's keys."""
        return await self._library.function(self._redis, name)(self.keys.waiting, [self.keys.prefix, *arguments])

    def admits(self, job: Job, asked: Asked) -> bool:
        """Tell whether `admit` takes a job: a short new one, where the ledger is on the queue's server, no cluster."""
        is_here = asked.ledger.redis is self._redis and not isinstance(self._redis, RedisCluster)
        return is_here and asked.received is None and len(job.prompt_ids) <= ADMITTED_TOKENS

    async def admit(self, job: Job, placement: Placement, asked: Asked) -> Reservation:
        """Reserve what a job asks for and put it into the queue: both or neither. Raises what these raise alone."""
        entry, limits = await self._entry(job, placement), self._limits.for_placement(placement)
        arguments = [
            *self._arguments(job, entry, limits),
            asked.ledger.pack_reserve(asked.reservation, None, asked.limits),
        ]
        try:
            reserved, *queued = await self._admit(arguments)
        except OutOfMemoryError as error:
            raise RedisFullError("Redis is out of memory") from error
        if queued:
            _check_queued(queued, limits)
        return asked.ledger.granted(reserved)

    async def enqueue(self, job: Job, placement: Placement | None = None) -> None:
        """Put a job into the queue; a newer attempt replaces an older one.

        Raises QuarantinedError; QueueFullError or DeadlineUnattainableError of a first attempt that has not begun,
        RedisFullError of any where Redis is out of memory.
        """
        placement = placement or Placement()
        entry, limits = await self._entry(job, placement), self._limits.for_placement(placement)
        arguments = self._arguments(job, entry, limits)
        try:
            answer = await self._enqueue(arguments)
        except OutOfMemoryError as error:
            if not entry.begun:
                raise RedisFullError("Redis is out of memory") from error
            arguments[_WHEN_FULL] = BEGUN_BYTES_WHEN_FULL
            answer = await self._answer_of("enqueue_when_full", *arguments[1:])
        _check_queued(answer, limits)

    def _arguments(self, job: Job, entry: Entry, limits: QueueLimits) -> list[Any]:
        terms = (job.deadline_ms, entry.begun, entry.priority, entry.strikes, *astuple(limits))
        return [
            *(self.keys.prefix, job.job_id, msgspec.msgpack.encode(terms)[1:], ""),
            *(entry.facts, entry.wanted, entry.body),
        ]

    async def _entry(self, job: Job, placement: Placement) -> Entry:
        """Return a job's entry; that of a long one is made in a thread, at its tenant's turn."""
        if job.prefill_tokens <= SHORT_TOKENS:
            return self.make_entry(job, placement)
        loop = asyncio.get_running_loop()
        return await self._turns.run(job.tenant, lambda: loop.run_in_executor(None, self.make_entry, job, placement))

    def make_entry(self, job: Job, placement: Placement) -> Entry:
        """Return a job's entry, sealed with credentials: that takes as long as all else of an enqueue."""
        return self._seals.entry(self.keys.prefix, job, placement) if self._seals else Entry.from_job(job, placement)

    async def claim(
        self,
        base_digest: str,
        capacity: Capacity,
        reports: Sequence[UsageReport] = (),
        *,
        wait_s: float = 0.0,
        freed: bool = False,
    ) -> Claimed:
        """Take the next jobs of a base model that suit a worker, up to its free rows; from now on they are its own.

        `reports` are charged first, as by `charge`, to count for whose turn it is. With `wait_s` the server waits
        for a wake-up; `stop_waiting` ends the wait. `freed`: the last claim was `crowded`, and capacity is free since.
        """
        await self.charge(reports[:-CHARGES_AT_ONCE])
        return await self._claims.claim(base_digest, capacity, reports[-CHARGES_AT_ONCE:], wait_s=wait_s, freed=freed)

    async def wait_for_work(self, timeout_s: float) -> bool:
        """Block until a wake-up comes; False when the time passed without one."""
        return await self._claims.wait_for_work(timeout_s)

    async def stop_waiting(self) -> None:
        """End the wait of this worker's claim, which then is made at once."""
        await self._answer_of("stop_waiting", self._worker_id)

    async def charge(self, reports: Sequence[UsageReport]) -> None:
        """Charge tenants what their jobs have made since the last report. Idempotent by job, attempt and tokens."""
        for at in range(0, len(reports), CHARGES_AT_ONCE):
            await self._answer_of("charge", packed_reports(reports[at : at + CHARGES_AT_ONCE]))

    async def stop_claiming(self) -> None:
        """Claim no more for now: jobs are not held for this worker, and its wake-ups go to another."""
        await self._answer_of("stop_claiming", self._worker_id)

    async def finish(self, job_id: str, attempt: int) -> None:
        """Forget a job, up to this attempt. Idempotent."""
        await self._finish([self.keys.prefix, job_id, attempt])

    async def look_up(self, jobs: Sequence[tuple[str, int]]) -> list[QueueState]:
        """Return the state of each attempt, by job id and attempt; a newer attempt of the same job counts too.

        A part of the jobs, another in each call, is put back where the queue has lost keys.
        """
        self._looks += 1
        states: list[QueueState] = []
        for at in range(0, len(jobs), LOOKS_AT_ONCE):
            asked = chain.from_iterable(jobs[at : at + LOOKS_AT_ONCE])
            states += map(QueueState, await self._answer_of("look_up", self._looks, *asked))
        return states

    async def renew(self, job: Job, placement: Placement) -> None:
        """Seal a waiting attempt anew, with a new grant for its adapter; nothing is done once it has left the queue."""
        if self._seals is not None:
            entry = self.make_entry(job, placement)
            await self._renew([job.attempt, entry.body, entry.wanted], self.keys.job(job.job_id))

    async def record_death(self, tenant: str, adapter: str, job_id: str, age_ms: int = 0) -> int:
        """Record a job that engines died of; returns for how many ms its tenant and adapter are refused. Idempotent."""
        return int(await self._answer_of("record_death", tenant, adapter, job_id, age_ms))

    async def quarantined(self) -> dict[tuple[str, str], int]:
        """Return for how many ms new jobs are refused, by tenant and its adapter's digest.

        A tenant alone, whose digest is "*", has all of its jobs refused; an empty digest is the base model.
        """
        found = await self._answer_of("quarantined")
        subjects = [subject.decode().partition(" ") for subject in found[::2]]
        whose = [(tenant, digest if space else "*") for tenant, space, digest in subjects]
        return dict(zip(whose, map(int, found[1::2]), strict=True))

    async def lift_quarantine(self, tenant: str) -> int:
        """Take a tenant's jobs again and forget the engines that died of them; returns how many records there were."""
        return int(await self._answer_of("lift_quarantine", tenant))

    async def forget_tenant(self, tenant: str) -> RemovedRecords:
        """Remove what the cell has of a tenant; returns what there was.

        The accounts of the ledger stay, so that a tenant that comes back has no new quota; so do charges without
        a usage event, and what expires within two minutes: charges of claimed jobs, operators' commands.
        """
        pins = await self.pins.forget_tenant(tenant)
        letters = [data for data, dead in await self.dead.records() if dead.tenant == tenant]
        jobs = others = at = 0
        while at >= 0 or letters:
            some = letters[:LOOKS_AT_ONCE]
            gone, records, at = await self._answer_of("forget_tenant", tenant, max(at, 0), LOOKS_AT_ONCE, *some)
            jobs, others, letters = jobs + gone, others + records, letters[LOOKS_AT_ONCE:]
        return RemovedRecords(jobs, pins, others)

    async def load(self) -> QueueLoad:
        """Return what waits, for how long, and the work that has arrived."""
        waiting, work, oldest_ms, *sums = await self._answer_of("queue_load")
        return QueueLoad(int(waiting), float(work), int(oldest_ms) / 1e3, *map(float, sums))

    async def count_waiting(self) -> int:
        """Return how many jobs wait."""
        return int(await self._redis.zcard(self.keys.waiting))


def _check_queued(answer: Sequence[bytes], limits: QueueLimits) -> None:
    """Raise what an answer of broker/lua/enqueue.lua says of a job that has no place."""
    match answer:
        case [b"late", wait_ms]:
            raise DeadlineUnattainableError(int(wait_ms))
        case [b"quarantined", left_ms]:
            raise QuarantinedError(int(left_ms))
        case [b"full", b"begun_bytes_when_full", _]:
            most = f"{BEGUN_BYTES_WHEN_FULL} bytes of jobs that have begun wait"
            raise RedisFullError(f"Redis is out of memory, and {most}")
        case [b"full", limit, whose]:
            name, owner = limit.decode(), whose.decode()
            may_wait = f"{getattr(limits, name)} {name.rpartition('_')[2]} may wait"
            if name.startswith("key_"):
                raise QueueFullError(f"{may_wait} of API key {owner}", key=owner)
            raise QueueFullError(f"{may_wait} of {owner}" if owner else may_wait, owner)
