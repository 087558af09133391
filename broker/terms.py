"""The terms on which jobs wait and are claimed: what the scripts of `broker.queue` and their twin share."""

from __future__ import annotations

from dataclasses import dataclass

from broker.codec import encode_adapter_request, encode_job
from broker.messages import AdapterRequest, Job

# What a token costs its tenant's counter (as in Sheng et al., Fairness in Serving Large Language Models, 2024).
PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
# How many tenants a scan looks at, and how many jobs that it can't take it passes over, in all and of one tenant.
TENANTS_WINDOW = 32
PASS_WINDOW = 64
TENANT_WINDOW = 16
# How many re-dispatched jobs a scan looks at.
AGAIN_WINDOW = 64
# What lies beyond its window a queue shows in turns: the first half is the queue's first jobs, the second half goes on
# with every scan. A claim that found nothing scans again, so many times at most; the next claim goes on from there.
SCANS_LIMIT = 8
# How many more, once no row is free, whose adapters are worth fetching beforehand, and how many adapters it names.
AHEAD_WINDOW = 16
WANTED_LIMIT = 4
# So long a job waits for the workers that its adapter prefers; loading an adapter takes longer.
HOLD_MS = 50
# The first in line waits so long for a worker in which it fits; then one makes room for it, and is renewed as its
# reservation with every claim.
PATIENCE_MS = 500
RESERVE_MS = 3_000
# What a worker said of its free rows counts so long; each claims at least once a second.
ROOM_MS = 1_500
# So long a router lives after it said so; where none has said so for QUIET_MS, all are taken to live.
ROUTER_MS = 3_000
QUIET_MS = 1_500
# A job's charges are remembered so long after the last report of it.
CHARGED_MS = 15_000
# Over how long the pace of claims is measured while work waits; from when on it tells something; and how many times
# longer than the deadline the wait must look before a job is refused: its order may change, and the pace too.
PACE_MS = 10_000
PACE_LEAST_MS = 2_000
DOUBT = 2
# How many jobs whose deadline has passed a claim takes out.
SWEEP_LIMIT = 64

PRIORITY_LIMIT = 100
# What a job takes that is to run alone: more than any worker has, so all of one's.
ALL_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How many jobs may wait in a cell, and how many bytes they may take: in all, and of one tenant."""

    jobs: int = 10_000
    bytes: int = 1 << 30
    tenant_jobs: int = 5_000
    tenant_bytes: int = 1 << 28


@dataclass(frozen=True, slots=True)
class Placement:
    """How a job is to wait. `prefer`: workers, the best first; `load_tokens`: what its adapter's load is charged as."""

    weight: float = 1.0
    prefer: tuple[str, ...] = ()
    load_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim took, how many jobs still wait after it, and the adapters that the next of these want most.

    `hold_ms`: in so long it may take a job that waits for another worker now; 0: there is none.
    """

    jobs: list[Job]
    waiting: int
    adapter_requests: list[AdapterRequest]
    hold_ms: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """What an attempt of a job has made so far. `ran`: whether any of it was computed at all."""

    job_id: str
    attempt: int
    tokens: int
    ended: bool = False
    ran: bool = True


@dataclass(frozen=True, slots=True)
class Entry:
    """What a claim must know of a waiting job."""

    tenant: str
    attempt: int
    weight: float
    priority: int
    # The most tokens that prompt and answer come to; those computed first; those of them that are charged.
    tokens: int
    prefill: int
    prompt: int
    rank: int
    rows: int
    base: str
    adapter: str
    load: float
    prefer: str
    # Whose it is.
    router: str
    wanted: bytes
    body: bytes

    @classmethod
    def of(cls, job: Job, placement: Placement) -> Entry:
        """A job's."""
        return cls(
            tenant=job.tenant,
            attempt=job.attempt,
            weight=placement.weight,
            priority=max(-PRIORITY_LIMIT, min(job.priority, PRIORITY_LIMIT)),
            tokens=job.tokens,
            prefill=job.prefill_tokens,
            prompt=len(job.prompt_ids),
            rank=job.rank,
            rows=ALL_ROWS if job.suspect else job.rows,
            base=job.base_digest,
            adapter=job.adapter.digest if job.adapter else "",
            load=placement.load_tokens,
            prefer="\n".join(placement.prefer),
            router=job.reply_to,
            wanted=encode_adapter_request(AdapterRequest(job.adapter, job.tenant)) if job.adapter else b"",
            body=encode_job(job),
        )
