"""A router's relay with jobs that are already dispatched: the process whose time bench.fan_in measures.

python -m bench.fan_in_router JOBS      serves until its standard input closes; prints its port

Readers take the ids of their jobs as calls do, and drop them: messages to clients are measured by bench.relay.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvloop

from loraplex.contracts.broker.messages import Job
from loraplex.contracts.broker.terms import Entry, Placement
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.relay import RelayService
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.runtime.rpc.server import Server, relay_options
from loraplex.runtime.tenancy.guard import open_guard


class _Queue:
    """Takes every job; the workers of this benchmark claim nothing."""

    def make_entry(self, job: Job, placement: Placement) -> Entry:
        """Return the job's entry."""
        return Entry.from_job(job, placement)

    async def enqueue(self, *_: object) -> None:
        """Do nothing."""


def job_id(number: int) -> str:
    """Return the name of a job, as long as those of real ones."""
    return f"tenant-{number % 100}/{number:016x}/{number:012x}"


async def serve(jobs: int) -> None:
    """Serve until the standard input closes."""
    queue: Any = _Queue()
    dispatcher = Dispatcher(lambda *_: queue, lambda *_: Placement())
    server = Server(open_guard(), options=relay_options())
    RelayService(dispatcher).add_to(server)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    stopping = StoppingParams(max_tokens=1 << 30)
    readers = []
    for number in range(jobs):
        job = Job(
            job_id(number), "acme", "hash", "sha256:0", "here", (1, 2, 3), stopping, sampling=SamplingParams(seed=1)
        )
        readers.append(asyncio.create_task(_read(await dispatcher.dispatch(job))))
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for reader in readers:
        reader.cancel()
    await server.stop(0)


async def _read(routed: RoutedJob) -> None:
    while await routed.arrivals(routed.reader):
        pass


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
