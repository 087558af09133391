"""The fields of a waiting job that the Lua functions read, beside its body."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import attrgetter

import msgspec

from broker.codec import encode_adapter_request, encode_job
from broker.messages import AdapterRequest, Job
from broker.terms import ALL_ROWS, PRIORITY_LIMIT, Placement

# Maximum prompt and emitted tokens of a job whose entry is made on the event loop.
SHORT_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Entry:
    """The fields of a waiting job. Those up to `key_weight` are its facts, which Redis keeps packed, in this order."""

    tenant: str
    base: str
    adapter: str
    # Workers that the adapter prefers, one a line.
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
            rows=queued_rows(job),
            strikes=job.strikes,
            base=job.base_digest,
            adapter=job.adapter.digest if job.adapter else "",
            load=placement.load_tokens,
            prefer="\n".join(placement.prefer),
            router=job.reply_to,
            key=placement.key.key,
            key_weight=placement.key.weight,
            wanted=encode_adapter_request(AdapterRequest(job.adapter, job.tenant)) if job.adapter else b"",
            body=encode_job(replace(job, weight=placement.weight)) if body is None else body,
        )

    @property
    def facts(self) -> bytes:
        """Return the packed facts, in MessagePack without the array's one byte."""
        return msgspec.msgpack.encode(_facts_of(self))[1:]


_NAMES = [field.name for field in fields(Entry)]
# Names of the facts, in the order in which they are packed.
FACTS = tuple(_NAMES[: _NAMES.index("begun")])
_facts_of = attrgetter(*FACTS)


def is_short(job: Job) -> bool:
    """Return whether a job's entry is made in about a millisecond."""
    return job.prefill_tokens <= SHORT_TOKENS


def charged_prompt(job: Job) -> int:
    """Return the prompt tokens that a claim of a job charges."""
    return job.prefill_tokens if job.resumed and job.attempt == 1 else len(job.prompt_ids)


def queued_rows(job: Job) -> int:
    """Return the rows that a waiting job asks for."""
    return ALL_ROWS if job.suspect else job.rows
