"""The terms on which jobs wait and are claimed, for the Lua functions (broker/functions.py).

Each tenant has a virtual counter of service, as in Sheng et al., Fairness in Serving Large Language Models, 2024 (VTC):
the tokens that it was charged, over its weight. Of the tenants with waiting jobs the one with the lowest counter is
next; a tenant that was idle is lifted to the lowest counter of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum
from operator import attrgetter

import msgspec

from loraplex.contracts.broker.messages import STRIKES_LIMIT, AdapterRequest, Job, encode_record
from loraplex.contracts.options import StoppingParams

# Tokens charged for a prompt token and for an output token.
PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
# Maximum tokens of an answer that the queue reckons with beforehand: few answers are as long as a large maximum, or as
# none, would let them be.
RECKONED_TOKENS = 2_048

# A function stops the whole server while it runs, so one scan over the waiting jobs is bounded by these four numbers:
# tenants that it looks at, jobs that it may pass over in all and of one tenant, redispatched jobs that it looks at.
TENANTS_PER_SCAN = 32
PASSES_PER_SCAN = 64
PASSES_PER_TENANT = 16
REDISPATCHED_PER_SCAN = 64
# Maximum scans of one claim that finds no job; the worker's next claim goes on where this one ended.
SCANS_PER_CLAIM = 8
# Maximum jobs that a scan looks at without a free row, to learn which adapters to fetch beforehand.
LOOKAHEAD_LIMIT = 16
# Minimum number of the last arrivals that are kept for workers that have looked at all older jobs.
NEWS_LIMIT = 64
# Number of last digits of a digest by which a claim names the worker's adapters. One that is taken for another changes
# where a job runs, or what it is charged for a load, and nothing else.
ADAPTER_DIGITS = 16

# Time in ms that a job is held for a worker that its adapter prefers; shorter than loading the adapter elsewhere.
HOLD_MS = 50
# The homes of adapters (broker/lua/demand.lua).
# Time in ms in which the demand for an adapter falls to 1/e, and the maximum number of adapters whose demand is kept.
DEMAND_MS = 30_000
DEMAND_LIMIT = 16_384
# Percentage of a worker's rows that one adapter is to take: for more demand it has further homes.
HOME_PERCENT = 25
# Time in ms after which the job that is first in line reserves a worker, which then makes room for it.
PATIENCE_MS = 500
# Time in ms after which a waiting job of a tenant below its share may have a row that another tenant's job is using.
BELOW_SHARE_MS = 100
# Time in ms for which a worker's count of free rows is believed; workers claim at least once a second.
FREE_ROWS_MS = 1_500
# Time in ms for which all routers are told the same roll of workers: half of the interval of a router's censuses.
ROLL_MS = 250
# Time in ms after a worker's last beat at which it is taken for dead.
WORKER_TTL_MS = 3_000
# Time in ms after a router's last beat at which it is taken for dead, unless no router has beaten for ROUTERS_QUIET_MS.
ROUTER_TTL_MS = 3_000
ROUTERS_QUIET_MS = 1_500
# Time in ms for which a claimed job's charges are remembered after its last usage report.
CHARGE_RECORD_MS = 15_000
# Time in ms for which the refund of a job that never ran is remembered: its next claim charges the prompt again.
REFUND_RECORD_MS = 120_000
# Time in ms from which on a measurement of the claim rate counts.
CLAIM_RATE_MIN_MS = 2_000
# Maximum tenants whose waiting work is read for an estimate of when a job's turn comes; that of others is reckoned.
TENANTS_PER_ESTIMATE = 32
# Maximum counter, in tokens over a weight: up to there a counter keeps parts of a token. Beyond it the lowest one is
# subtracted from all.
COUNTERS_LIMIT = 1 << 40
# Maximum lead of a tenant whose resumed job goes before newcomers, as the time in ms in which the whole cell claims so
# much work, and its minimum in charged tokens: some 50 answers of 1,000 tokens. A tenant that is further ahead cannot
# pass others by resuming answers.
RESUME_LEAD_MS = 60_000
RESUME_LEAD_WORK = 100_000
# Maximum jobs that one enqueue displaces.
DISPLACED_PER_ENQUEUE = 64
# Maximum resume keys that are kept: each lost Redis or rotation adds one.
RESUME_KEYS_LIMIT = 8
# Maximum wake-ups in a list; more of them than idle workers are of no use.
WAKE_LIMIT = 64
# Maximum wake-ups that workers pass on in an interval, in ms, because they could not use them: each costs a claim.
PASSED_ON_LIMIT = 50
PASSED_ON_MS = 100
# Number of a router's looks at its waiting jobs in which each job is looked for in its queue once.
LOOKS_PER_CHECK = 8
# Time in seconds that a sealed job is valid. Its router seals it anew after half of that while it waits. Clocks of
# routers and workers may differ by minutes.
SEALED_JOB_S = 900.0

# The quarantine of tenants whose jobs kill engines. Only proof counts: a job that was ended because engines died of it,
# the last ones while they had no other job. So nobody is quarantined because its jobs were in a batch with another's.
#
#     deaths with an adapter within an hour       1      2      3      4 and more
#     refused: the tenant's jobs with it          1 min  5 min  25 min 1 h
#     deaths with other adapters before it        -      1      2      3 and more
#     refused: all jobs of the tenant             -      1 min  5 min  25 min to 1 h
#
# Time in ms for which jobs are refused after a first death, which grows with each further one, and its maximum; and the
# time in ms after which a death is forgotten.
QUARANTINE_MS = 60_000
QUARANTINE_LIMIT_MS = 3_600_000
DEATHS_MEMORY_MS = 3_600_000

# Time in ms after a strike for which its job's tenant and adapter are suspect, unless a token clears the job; and the
# time after a worker's last report for which it is taken to have a job of them.
SUSPECT_MS = 60_000
TRIED_MS = 3_000
# Number of strikes from which on no token clears a job.
TRIAL_STRIKES = STRIKES_LIMIT

PRIORITY_LIMIT = 100
# Bytes that stand before the id in a member of a tenant's queue, and the first of these that give deadline or turn, and
# the arrival.
PLACE_BYTES = 35
TURN_BYTE = 4
ARRIVAL_BYTE = 19
# Rows of a job that runs alone: more than any worker has, which means all rows of one worker.
ALL_ROWS = 1 << 16

# The ledger (broker/ledger.py).
# Time in ms after a router's last renewal, which comes every second, after which others end its reservations.
HELD_MS = 10_000
# Maximum reservations of dead routers that one renewal ends: a function stops the whole server while it runs.
EXPIRED_AT_ONCE = 256
# Time in ms in which routers tell a ledger that has lost data what they know, before it grants anything.
RECOVERY_MS = 2_000
# Time in ms after the last answer of the router that loads the store's accounts, after which another does.
LOAD_MS = 3_000
# Interval in ms between looks whether the accounts are loaded.
LOAD_LOOK_MS = 250
# Number of times that a request may be resumed before each further one counts as a request, with its prompt.
FREE_RESUMES = 8
# Time in ms after which a tenant with all its streams is to call again.
STREAM_RETRY_MS = 1_000


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Maximum number and bytes of the jobs that wait in a cell: of all tenants, of one, and of one API key.

    Jobs that have begun are never refused. When the limit of all tenants is reached, a tenant with a lower use of the
    queue displaces the last job of the tenant with the highest.
    """

    jobs: int = 10_000
    bytes: int = 1 << 30
    # Maximum waiting newcomers of one tenant, their maximum bytes, and the same of one API key: by their queue shares.
    tenant_jobs: int = 1 << 50
    tenant_bytes: int = 1 << 50
    key_jobs: int = 1 << 50
    key_bytes: int = 1 << 50

    def for_placement(self, placement: Placement) -> QueueLimits:
        """Return the limits for a job whose tenant and key may take shares of the queue, at least one job."""
        limits = self
        if placement.queue_share < 1:
            jobs, size = self._part(placement.queue_share)
            limits = replace(self, tenant_jobs=min(self.tenant_jobs, jobs), tenant_bytes=min(self.tenant_bytes, size))
        if placement.key.queue_share < 1:
            jobs, size = self._part(placement.key.queue_share)
            limits = replace(limits, key_jobs=jobs, key_bytes=size)
        return limits

    def _part(self, fraction: float) -> tuple[int, int]:
        return max(1, int(fraction * self.jobs)), int(fraction * self.bytes)


class QueueState(IntEnum):
    """The state of an attempt in the queue, as `look_up` of broker/lua/upkeep.lua answers it."""

    # Claimed, lost, dropped at its deadline, or only an older attempt is in Redis.
    ABSENT = 0
    WAITS = 1
    # Removed from a full queue for a job of a tenant that uses less of it.
    DISPLACED = 2


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """The terms on which the jobs of calls with one API key wait, beside those of their tenant."""

    # Empty for a call without a key, and with one whose plan says nothing of the queue.
    key: str = ""
    # The key's share among the keys of its tenant; 0: it has none, and shares a weight of 1 with all such calls.
    weight: float = 0.0
    # Maximum share of the queue that waiting jobs of the key may take.
    queue_share: float = 1.0


NO_KEY = KeyTerms()


@dataclass(frozen=True, slots=True)
class Placement:
    """A router's placement of a job in the queue."""

    # The tenant's weight: twice the weight gets twice the service.
    weight: float = 1.0
    # Ids of the workers that the job's adapter prefers, the best first.
    prefer: tuple[str, ...] = ()
    # Tokens charged for loading the adapter.
    load_tokens: float = 0.0
    # Maximum share of the queue that waiting jobs of the tenant may take.
    queue_share: float = 1.0
    key: KeyTerms = NO_KEY
    # The cell that has the job.
    cell: str = ""
    # True if a worker has had an earlier attempt of the job.
    begun: bool = False
    # Incarnations of workers that are to load the adapter for later jobs.
    warm: tuple[str, ...] = ()
    # False if another worker can take the job should this attempt's worker fail.
    last_try: bool = True


@dataclass(frozen=True, slots=True)
class Claimed:
    """A claim's answer."""

    jobs: list[Job]
    # Jobs that still wait.
    waiting: int
    # Adapters that most of the next jobs need.
    adapter_requests: list[AdapterRequest]
    # Time in ms after which the worker may get a job that is held for another one; 0: no such job.
    hold_ms: int = 0
    # Routers of jobs that suit the worker but for its missing link to them.
    unlinked: tuple[str, ...] = ()
    # True if a job waits that suits the worker once it has more free rows or tokens.
    crowded: bool = False
    # Jobs that this worker can't read, as far as the queue knows them: their routers are to be told.
    unread: tuple[Job, ...] = ()
    # Number of the unread jobs that count against this worker: not those whose seals have expired by Redis's clock.
    refused_here: int = 0


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """The waiting jobs of a cell. Work is in charged tokens, as though every answer had its full length.

    `oldest_wait_s` is of the jobs that are next: the first of each tenant, of TENANTS_PER_ESTIMATE tenants.
    `arrived_work` and `claimed_work` are sums of all arrivals and claims, which begin anew with Redis's data.
    """

    waiting: int = 0
    waiting_work: float = 0.0
    oldest_wait_s: float = 0.0
    arrived_work: float = 0.0
    claimed_work: float = 0.0


@dataclass(frozen=True, slots=True)
class UsageReport:
    """A worker's report of an attempt's output so far."""

    job_id: str
    attempt: int
    # Output tokens of all choices.
    tokens: int
    ended: bool = False
    # False for an attempt of which no step was computed: its prompt is refunded.
    ran: bool = True


@dataclass(frozen=True, slots=True)
class Entry:
    """The fields of a waiting job. Those up to `key_weight` are its facts, which Redis keeps packed, in this order."""

    tenant: str
    base: str
    adapter: str
    # Workers that the adapter prefers, one a line; after them, each with a "!", those that the job failed at.
    prefer: str
    # The relay address of the router that owns the job.
    router: str
    attempt: int
    weight: float
    # Maximum tokens of prompt and answer together.
    tokens: int
    # Tokens to compute before the first new one: the prompt, and what earlier attempts emitted.
    prefill: int
    # Prompt tokens, which are charged; with the received ones of a resumed answer, which are computed again.
    prompt: int
    rank: int
    rows: int
    load: float
    # The API key of the call, and its weight; see KeyTerms.
    key: str
    key_weight: float
    # 1 for an answer that has begun: it has tokens, or a worker has had the job.
    begun: int
    priority: int
    strikes: int
    # The encoded AdapterRequest; empty without an adapter.
    wanted: bytes
    body: bytes

    @classmethod
    def from_job(cls, job: Job, placement: Placement, body: bytes | None = None) -> Entry:
        """Return a job's entry; without a `body`, the encoded job is it."""
        return cls(
            tenant=job.tenant,
            attempt=job.attempt,
            begun=int(placement.begun or bool(job.done) or any(job.emitted.values())),
            weight=placement.weight,
            priority=max(-PRIORITY_LIMIT, min(job.priority, PRIORITY_LIMIT)),
            tokens=job.tokens,
            prefill=job.prefill_tokens,
            prompt=charged_prompt(job),
            rank=job.rank,
            rows=ALL_ROWS if job.suspect else job.rows,
            strikes=job.strikes,
            base=job.base_digest,
            adapter=job.adapter.digest if job.adapter else "",
            load=placement.load_tokens,
            prefer="".join(f"{worker}\n" for worker in (*placement.prefer, *(f"!{one}" for one in job.failed_at))),
            router=job.reply_to,
            key=placement.key.key,
            key_weight=placement.key.weight,
            wanted=encode_record(AdapterRequest(job.adapter, job.tenant)) if job.adapter else b"",
            body=encode_record(placed(job, placement)) if body is None else body,
        )

    @property
    def facts(self) -> bytes:
        """Return the packed facts, in MessagePack without the array's one byte."""
        return msgspec.msgpack.encode(_facts_of(self))[1:]


_NAMES = [field.name for field in fields(Entry)]
# Names of the facts, in the order in which they are packed.
FACTS = tuple(_NAMES[: _NAMES.index("begun")])
_facts_of = attrgetter(*FACTS)
# Names of the values that broker/lua/jobs.lua packs for each job, in order: the entry's facts, then the queue's own.
# Behind _ARRAY they are a MessagePack array.
_NOTED = (*FACTS, "place", "size", "work", "queued", "deadline")
_ARRAY = b"\xdc" + len(_NOTED).to_bytes(2, "big")


def read_facts(packed: bytes) -> dict[str, str | float]:
    """Return what the queue has noted of a job. Raises MsgspecError, ValueError or RecursionError."""
    return dict(zip(_NOTED, msgspec.msgpack.decode(_ARRAY + packed, type=list[str | float]), strict=True))


def unread_job(packed: bytes) -> Job | None:
    """Return what the queue knows of a job that a worker can't read, for its router; None: its facts are damaged."""
    try:
        noted = read_facts(packed)
        place, tenant, base, router = (str(noted[name]) for name in ("place", "tenant", "base", "router"))
        # The place of a job that has begun is its id, which a router begins with the tenant.
        is_id = place.startswith(f"{tenant}/") or len(place) <= PLACE_BYTES
        job_id, attempt = place if is_id else place[PLACE_BYTES:], int(noted["attempt"])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return Job(job_id, tenant, "", base, router, (), StoppingParams(), attempt=attempt)


def placed(job: Job, placement: Placement) -> Job:
    """Return a job with what its worker needs to know of its placement."""
    return replace(job, weight=placement.weight, last_try=placement.last_try)


def charged_prompt(job: Job) -> int:
    """Return the prompt tokens that a claim of a job charges."""
    return job.prefill_tokens if job.resumed and job.attempt == 1 else len(job.prompt_ids)


def work_of(job: Job) -> float:
    """Return the work of a job in charged tokens, as though its answer had its full length, or RECKONED_TOKENS."""
    prompt = charged_prompt(job)
    return PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * min(RECKONED_TOKENS, max(0, job.tokens - prompt))
