"""Declares what Redis carries: jobs, requests for adapters, dead letters, claims, seals, and the state of workers.

In Redis they are MessagePack, by the names of their fields. A version ignores fields that it does not know, and a field
that it needs and that an older one does not write has a default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec
from msgspec import DecodeError

from loraplex.contracts.options import Encode, SamplingParams, StoppingParams

# Integers that fit the fields of the relay's and the services' messages, which raise for others.
U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# The parts of a weighted set: pairs of a revision's digest and its weight.
WeightedParts = tuple[tuple[str, float], ...]
# A time in ms since 1970 before the year 10000, where protobuf's Timestamp ends.
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999)]

# Number of strikes, engines that died with the job newly in their batch, from which on a job begins apart from all jobs
# that have none, and from which on it runs alone and ends with the next. So only the first engine has other jobs.
SUSPECT_STRIKES = 1
STRIKES_LIMIT = 2


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An immutable revision of an adapter. `revision` is its full name, `weight_bytes` its safetensors' size.

    A weighted set of revisions has `parts`: then `revision` is its digest (see artifacts.names.weighted_digest), and
    rank and bytes are the sums over the parts.
    """

    revision: str
    digest: str
    rank: U32
    weight_bytes: U63
    parts: tuple[WeightedRef, ...] = ()
    # A router's grant to download the revisions; empty without credentials.
    grant: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raise ValueError for a set within a set, which no router writes: its hash would recurse as deep."""
        if any(part.adapter.parts for part in self.parts):
            raise ValueError("a weighted set of revisions is part of another")

    @property
    def summands(self) -> tuple[AdapterRef, ...]:
        """Return the revisions to load, each with the grant: this one, or the parts of a set."""
        return tuple(replace(part.adapter, grant=self.grant) for part in self.parts) or (self,)


@dataclass(frozen=True, slots=True)
class WeightedRef:
    """A revision of a weighted set, and the factor of its output."""

    adapter: AdapterRef
    weight: float


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    """An adapter that a waiting job or an operator asks a worker to have, and the tenant whose adapter it is."""

    adapter: AdapterRef
    tenant: str


@dataclass(frozen=True, slots=True)
class Job:
    """A request as it waits in the queue. `emitted` has the tokens of earlier attempts, by choice."""

    job_id: str
    tenant: str
    model: str
    base_digest: str
    reply_to: str
    prompt_ids: tuple[int, ...]
    stopping: StoppingParams
    request_id: str = ""
    attempt: U32 = 1
    adapter: AdapterRef | None = None
    emitted: dict[U32, tuple[int, ...]] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    priority: int = 0
    # Time in ms that was left at the enqueue; 0: no deadline.
    deadline_ms: U63 = 0
    strikes: U32 = 0
    # Number of alternatives to report for each token; None: no logprobs. They are the likeliest ids, or these.
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    # The first prompt token whose log probabilities are reported, counted from 0.
    prompt_logprobs_start: U32 = 0
    # Choices that have ended, while others of the request go on.
    done: tuple[U32, ...] = ()
    # The W3C traceparent of the request's span; empty: not traced.
    traceparent: str = ""
    # True if the answer had begun at another router: the job was admitted before.
    resumed: bool = False
    # The tenant's weight, set at the enqueue: twice the weight gets twice the service.
    weight: float = 1.0
    # The grammar that the answers keep to, as grammars builds it; empty: none.
    grammar: str = ""
    # Whether the worker may draft tokens.
    speculate: bool = True
    # The vector of the prompt that is asked for instead of an answer; `n` is 1 and `max_tokens` 0.
    encode: Encode | None = None
    # Position of an activated adapter's invocation in the prompt, before which the base model computes. None: it is no
    # activated adapter.
    invoked_at: U32 | None = None
    # Workers that could not serve earlier attempts for a fault of their own.
    failed_at: tuple[str, ...] = ()
    # False while the router has another worker for the job: then a fetch that fails is not tried again here.
    last_try: bool = True

    @property
    def tokens(self) -> int:
        """Return the maximum tokens of prompt and answer together."""
        return len(self.prompt_ids) + self.stopping.max_tokens

    @property
    def prefill_tokens(self) -> int:
        """Return the number of tokens to compute before the first new one."""
        # The choices share the prompt's blocks.
        return len(self.prompt_ids) + sum(len(ids) for ids in self.emitted.values())

    @property
    def rows(self) -> int:
        """Return the number of choices that have not ended; each takes a row."""
        return self.n - len(self.done)

    @property
    def rank(self) -> int:
        """Return the rank of the adapter; 0 without an adapter."""
        return self.adapter.rank if self.adapter else 0

    @property
    def suspect(self) -> bool:
        """Return whether the job begins apart from others, because it may be what kills the engines."""
        return self.strikes >= SUSPECT_STRIKES

    @property
    def on_trial(self) -> bool:
        """Return whether the job runs alone on its worker, and ends if the engine dies."""
        return self.strikes >= STRIKES_LIMIT


@dataclass(frozen=True, slots=True)
class DeadJob:
    """The record of a job that killed its workers' engines, without prompt and output."""

    job_id: str
    request_id: str
    tenant: str
    model: str
    # The revision's full name, or a weighted set's digest; empty for the base model.
    adapter_revision: str
    prompt_tokens: U32
    # Of all choices.
    completion_tokens: U32
    attempts: U32
    # The reason that the client got, in UPPER_SNAKE_CASE.
    reason: str
    # Time in ms since 1970, by the router's clock.
    died_at_ms: Milliseconds


@dataclass(frozen=True, slots=True)
class RowToShare:
    """A row that a worker would take from a tenant above its share for a waiting tenant below its share."""

    tenant: str
    # Number of rows, over its weight, that the tenant then still has on this worker.
    rows_left: float
    # Number of rows of every tenant on this worker, those that wait for a row included.
    tenant_rows: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The free capacity of a claiming worker, and its adapters."""

    rows: int
    # All rows of the worker, free or not; a job of more choices takes all of them.
    rows_limit: int
    # Free tokens of KV cache.
    tokens: int
    # Maximum tokens of a job, prompt and answer together.
    max_tokens: int
    max_rank: int
    # Digests of the revisions on the device.
    adapters: tuple[str, ...] = ()
    # Relay addresses of the routers that the worker has a link to: it gets jobs of these alone. None: of all routers.
    routers: tuple[str, ...] | None = None
    # None: no tenant has rows to share.
    row_to_share: RowToShare | None = None
    # The tenant of all jobs here; empty without any, or where they are of several tenants.
    only_tenant: str = ""


@dataclass(frozen=True, slots=True)
class AdapterTiers:
    """Counts of a worker's adapters on the device, in host memory and on disk, since its start; bytes as stored."""

    # Adapters on the way from the store to the disk, and from the disk to the device.
    fetching: U32 = 0
    loading: U32 = 0
    # Requests that found their adapter on the device, and that did not.
    hits: U63 = 0
    misses: U63 = 0
    # Loads that evicted another adapter from its slot.
    swaps: U63 = 0
    device_bytes: U63 = 0
    host_bytes: U63 = 0
    disk_bytes: U63 = 0
    disk_bytes_limit: U63 = 0
    disk_adapters: U32 = 0
    # Requests that found their adapter on the disk, and that did not.
    disk_hits: U63 = 0
    disk_misses: U63 = 0


class SealKind(StrEnum):
    """The uses of seals (broker/seals.py)."""

    JOB = "job"
    COMMAND = "command"
    # Adapters that all workers keep: such a seal does not expire, and is opened by each worker that starts.
    PIN = "pin"


class Sealed(msgspec.Struct):
    """The bytes of a record, encrypted with the cluster's job key (AES-256-GCM) and signed by a router.

    Bound to them are the seal's kind, its place in Redis, and the fields before the ciphertext.
    """

    # The key, by its id in the file of --job-key.
    key_id: str
    nonce: bytes
    # In ms since 1970; 0: never.
    expires_at_ms: Annotated[int, msgspec.Meta(ge=0)]
    ciphertext: bytes = b""
    # The router's certificate and those between it and the authority, in DER.
    certificates: tuple[bytes, ...] = ()
    signature: bytes = b""


class SealError(ValueError):
    """Something in Redis that no router has sealed for this place and time.

    `reason` is in UPPER_SNAKE_CASE; `expired_at_ms` is the end of a seal's time in ms since 1970; 0: another reason.
    """

    def __init__(self, reason: str, message: str, expired_at_ms: int = 0) -> None:
        super().__init__(message)
        self.reason, self.expired_at_ms = reason, expired_at_ms

    @property
    def may_be_ours(self) -> bool:
        """Return whether another worker may open the seal: one with the right keys, authorities, clock or version."""
        return self.reason in {"KEY_UNKNOWN", "SEAL_EXPIRED", "SIGNATURE_INVALID", "UNREADABLE"}


class WorkerPhase(StrEnum):
    """The phase of a live worker: only a serving one claims jobs."""

    SERVING = "serving"
    DRAINING = "draining"
    # Claims nothing for a while, since its engine died and another starts, several died in a row, or it could not open
    # the last jobs' seals.
    FAILING = "failing"

    @classmethod
    def _missing_(cls, value: object) -> WorkerPhase:
        """Map an unknown phase, of a newer version, to one that claims no jobs."""
        return cls.DRAINING


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state that a live worker reports with every beat."""

    worker_id: str
    incarnation: str
    phase: WorkerPhase
    model: str
    base_digest: str
    rows_running: U32
    rows_waiting: U32
    rows_limit: U32
    blocks_total: U32
    blocks_free: U32
    blocks_cached: U32
    blocks_referenced: U32
    slots_total: U32
    slots_used: U32
    slots_pinned: U32
    adapters: tuple[str, ...]
    max_rank: U32
    max_tokens: U32
    steps: U63
    host: str
    pid: U32
    engine_pid: U32
    tiers: AdapterTiers = AdapterTiers()
    # The parts of the weighted sets among `adapters`, by the digests of these.
    sets: dict[str, WeightedParts] = field(default_factory=dict)
    # True if its last fetch of an adapter failed: it is home of no adapter that it lacks.
    fetch_fails: bool = False
    # True while its engine starts in place of one that died in service: jobs wait for it.
    returns: bool = False


# In front of a sealed job or command.
SEALED = b"sealed "
# Maximum number of answers of a job, far above what routers admit: a worker keeps a record of each.
MAX_ANSWERS = 256

_Record = TypeVar("_Record", Job, AdapterRequest, DeadJob, WorkerState, Sealed)
_encoder = msgspec.msgpack.Encoder()


def encode_record(record: Job | AdapterRequest | DeadJob | WorkerState | Sealed) -> bytes:
    """Encode a record."""
    return _encoder.encode(record)


def decode_record(kind: type[_Record], data: bytes) -> _Record:
    """Decode a record of a kind. Raises DecodeError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (ValueError, RecursionError) as error:  # a text that is not UTF-8, or parts within parts
        raise DecodeError(str(error)) from error


def decode_job(data: bytes) -> Job:
    """Decode a job. Raises DecodeError, also for a sealed one."""
    if data.startswith(SEALED):
        raise DecodeError("the job is sealed, and this process runs without credentials")
    job = decode_record(Job, data)
    if not job.job_id:
        raise DecodeError("the job has no id")
    if not 0 < job.n <= MAX_ANSWERS:
        raise DecodeError(f"n: {job.n} answers; a job has 1 to {MAX_ANSWERS}")
    if not 0 < job.weight < math.inf:  # a worker divides by it
        raise DecodeError(f"weight: {job.weight:g} is not a finite number above 0")
    return job
