"""Sealed jobs in the queue: what a router puts in, and what a worker checks before it takes one out.

The queue's scripts decide by facts that stand beside the sealed body. A worker takes a job only if they are the body's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from google.protobuf.message import DecodeError
from loraplex.queue.v1 import queue_pb2

from broker.codec import decode_job
from broker.keys import Keys
from broker.messages import Job
from broker.queue_entry import Entry, charged_prompt, queued_rows
from broker.seal_kinds import SealError, SealKind
from broker.seals import Seals
from broker.terms import PLACE_BYTES, Placement
from tenancy.signatures import UNREADABLE


class _Facts(msgspec.Struct, array_like=True, frozen=True):
    """Facts of a job as the queue has noted them, in the order of broker/lua/include/waiting_jobs.lua."""

    tenant: str
    base: str
    adapter: str
    prefer: str
    router: str
    attempt: float
    weight: float
    tokens: float
    prefill: float
    prompt: float
    rank: float
    rows: float
    load: float
    key: str
    key_weight: float
    place: str
    size: float
    work: float
    queued: float
    deadline: float


# The facts are packed one after the other; with this before them they are an array in MessagePack.
_ARRAY = b"\xdc" + len(_Facts.__struct_fields__).to_bytes(2, "big")


def sealed_entry(seals: Seals, keys: Keys, job: Job, placement: Placement) -> Entry:
    """Return a job's entry with a sealed body, in which the job has a grant for its adapter."""

    def sealed(body: bytes) -> bytes:
        return queue_pb2.Job(sealed=seals.seal(SealKind.JOB, keys.prefix, body)).SerializeToString()

    return Entry.from_job(seals.granted_job(job), placement, sealed)


def open_jobs(seals: Seals, keys: Keys, bodies: Sequence[bytes], facts: Sequence[bytes]) -> list[Job | None]:
    """Return the jobs of a claim; None for one that is refused, which its router misses and dispatches again."""
    jobs: list[Job | None] = []
    for body, of_body in zip(bodies, facts, strict=True):
        try:
            jobs.append(_open_job(seals, keys, body, of_body))
        except SealError as error:
            seals.on_refused(SealKind.JOB, error)
            jobs.append(None)
    return jobs


def _open_job(seals: Seals, keys: Keys, body: bytes, facts: bytes) -> Job:
    try:
        message = queue_pb2.Job.FromString(body)
    except DecodeError as error:
        raise SealError("UNSEALED", "a job that is no message") from error
    if not message.HasField("sealed"):
        raise SealError("UNSEALED", "a job without a seal")
    content = seals.open(SealKind.JOB, keys.prefix, message.sealed)
    try:
        job = decode_job(content)
    except DecodeError as error:  # of a router of another version
        raise SealError("UNREADABLE", "a job that this version cannot read") from error
    _check_facts(job, facts)
    return job


def _check_facts(job: Job, packed: bytes) -> None:
    """Raise SealError where the queue has handled another job than the sealed one."""
    try:
        facts = msgspec.msgpack.decode(_ARRAY + packed, type=_Facts)
    except UNREADABLE as error:
        raise SealError("FACTS_DIFFER", "a job whose facts cannot be read") from error
    pairs = {
        "id": (facts.place if facts.place == job.job_id else facts.place[PLACE_BYTES:], job.job_id),
        "tenant": (facts.tenant, job.tenant),
        "base": (facts.base, job.base_digest),
        "adapter": (facts.adapter, job.adapter.digest if job.adapter else ""),
        "router": (facts.router, job.reply_to),
        "attempt": (facts.attempt, job.attempt),
        "weight": (facts.weight, job.weight),
        "tokens": (facts.tokens, job.tokens),
        "prefill": (facts.prefill, job.prefill_tokens),
        "prompt": (facts.prompt, charged_prompt(job)),
        "rank": (facts.rank, job.rank),
        "rows": (facts.rows, queued_rows(job)),
    }
    for name, (noted, sealed) in pairs.items():
        if noted != sealed:
            raise SealError("FACTS_DIFFER", f"a job whose {name} in the queue is not the sealed one")
