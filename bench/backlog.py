"""The cost of a backlog that suits no worker: Redis's share of a core, and what newcomers that do suit wait.

    python -m bench.backlog [--workers 50] [--seconds 10] [--jobs 5000]

A real Valkey, the real scripts, and claimers that pace their claims as a worker's intake does. Half of the claimers are
idle, the others run jobs beside their free rows.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

from redis.asyncio import Redis

from bench.scaling_redis import used_s
from bench.valkey import running_valkey
from loraplex.contracts.broker.connection import connect
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import AdapterRef, Capacity, Job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import QueueLimits
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.worker.io.intake import FIT_S, IDLE_S

_KEYS = Keys("model", "main")
_BASE = "sha256:" + "0" * 64
_LIMITS = QueueLimits(jobs=1 << 30, tenant_jobs=1 << 30)
_CAPACITY = Capacity(rows=4, rows_limit=32, tokens=4_096, max_tokens=8_192, max_rank=64)
# Newcomers a second that suit every worker.
_NEWCOMERS = 20
_SMALL = Job(
    "", "quiet", "model", _BASE, "router", tuple(range(64)), StoppingParams(64), sampling=SamplingParams(seed=1)
)
# Jobs that wait, by the reason that nobody takes them, and the number of their tenants.
_BACKLOGS: dict[str, tuple[Job | None, int]] = {
    "none": (None, 0),
    "another base, many tenants": (replace(_SMALL, base_digest="sha256:" + "1" * 64), 500),
    "another base, one tenant": (replace(_SMALL, base_digest="sha256:" + "1" * 64), 1),
    "too many tokens": (replace(_SMALL, stopping=StoppingParams(1 << 20)), 50),
    "too high a rank": (replace(_SMALL, adapter=AdapterRef("r", "sha256:a", 128, 1)), 50),
    "dispatched again": (replace(_SMALL, base_digest="sha256:" + "1" * 64, attempt=2), 50),
    "more rows than are free": (replace(_SMALL, n=16), 50),
}


class _Claimers:
    """Claimers, and when they took which newcomer."""

    def __init__(self) -> None:
        self.taken_at: dict[str, float] = {}
        self.claims = 0

    async def run(self, url: str, number: int) -> None:
        """Claim as loraplex.worker.io.intake.Intake does; never returns."""
        redis = await connect(url)
        queue = JobQueue(redis, _KEYS, worker_id=f"w{number}")
        wait_s, is_busy = 0.0, number % 2 == 0
        try:
            while True:
                claimed = await queue.claim(_BASE, _CAPACITY, wait_s=wait_s)
                self.claims += 1
                self.taken_at.update((job.job_id, time.perf_counter()) for job in claimed.jobs)
                wait_s = 0.0
                if not claimed.jobs and is_busy and claimed.crowded:
                    await asyncio.sleep(claimed.hold_ms / 1e3 or FIT_S)
                elif not claimed.jobs:
                    wait_s = claimed.hold_ms / 1e3 or IDLE_S
        finally:
            await redis.aclose()


@asynccontextmanager
async def _beating(queue: JobQueue) -> AsyncIterator[None]:
    """Keep the jobs' router alive: a claim drops those of a dead one."""

    async def beat() -> None:
        while True:
            await queue.enqueue(replace(_SMALL, job_id="beat", attempt=2))
            await queue.finish("beat", 2)
            await asyncio.sleep(1.0)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()


async def measure(url: str, workers: int, seconds: float, jobs: int, names: Iterator[str] | None = None) -> None:
    """Print a line for each backlog."""
    redis = await connect(url)
    print(f"{workers} workers, {jobs} waiting jobs; {_NEWCOMERS} newcomers a second")
    print(f"{'the backlog':28} {'core':>6} {'claims/s':>9} {'newcomers wait p50, p99':>24}")
    for name in names or iter(_BACKLOGS):
        share, claims, waits = await _measure(redis, url, name, workers, seconds, jobs)
        waits.sort()
        p50, p99 = (waits[int(len(waits) * part)] * 1e3 for part in (0.5, 0.99))
        print(f"{name:28} {share:6.1%} {claims:9.0f} {p50:13.1f} ms {p99:5.1f} ms", flush=True)
    await redis.aclose()


async def _measure(
    redis: Redis, url: str, name: str, workers: int, seconds: float, jobs: int
) -> tuple[float, float, list[float]]:
    await redis.flushall()
    await redis.hset(_KEYS.workers, mapping={f"i{number}": f"w{number}" for number in range(workers)})
    queue = JobQueue(redis, _KEYS, limits=_LIMITS)
    waits, tenants = _BACKLOGS[name]
    for first in range(0, jobs if waits else 0, 50):
        numbers = range(first, min(first + 50, jobs))
        await asyncio.gather(
            *(
                queue.enqueue(replace(waits or _SMALL, job_id=f"j{number}", tenant=f"t{number % tenants}"))
                for number in numbers
            )
        )
    claimers = _Claimers()
    async with _beating(queue):
        running = [asyncio.create_task(claimers.run(url, number)) for number in range(workers)]
        await asyncio.sleep(2.0)
        sent: dict[str, float] = {}
        used, began, claims = await used_s(redis), time.perf_counter(), claimers.claims
        while time.perf_counter() < began + seconds:
            new = f"new{len(sent)}"
            sent[new] = time.perf_counter()
            await queue.enqueue(replace(_SMALL, job_id=new))
            await asyncio.sleep(1 / _NEWCOMERS)
        spent_s = time.perf_counter() - began
        share, rate = (await used_s(redis) - used) / spent_s, (claimers.claims - claims) / spent_s
        await asyncio.sleep(2.0)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return share, rate, [claimers.taken_at.get(new, time.perf_counter()) - at for new, at in sent.items()]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.backlog", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=50, help="claiming workers")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds for each backlog")
    parser.add_argument("--jobs", type=int, default=5_000, help="waiting jobs that suit nobody")
    arguments = parser.parse_args()
    with running_valkey() as url:
        asyncio.run(measure(url, arguments.workers, arguments.seconds, arguments.jobs))


if __name__ == "__main__":
    main()
