"""Jobs of a tenant, and claims of a worker that takes all of them."""

from __future__ import annotations

from dataclasses import replace

from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import Capacity, Job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.options import SamplingParams, StoppingParams

KEYS = Keys("tiny", "main")
ROOMY = Capacity(rows=8, rows_limit=8, tokens=10_000, max_tokens=4096, max_rank=64)


def job(job_id: str, **changes: object) -> Job:
    base = Job(
        job_id=job_id,
        tenant="acme",
        model="tiny",
        base_digest="sha256:0",
        reply_to="127.0.0.1:1",
        prompt_ids=(1, 2, 3),
        stopping=StoppingParams(max_tokens=10),
        sampling=SamplingParams(seed=7),
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # field names are checked by replace


async def claim(queue: JobQueue, **changes: object) -> list[str]:
    capacity = replace(ROOMY, **changes)  # type: ignore[arg-type]  # as above
    return [claimed.job_id for claimed in (await queue.claim("sha256:0", capacity)).jobs]
