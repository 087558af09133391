"""Compares one cell with two, each on a Valkey of its own: `python -m bench.cells [--quick] [--json FILE]`.

Jobs go to the cells that a router's rule chooses, are claimed there one by one, and charged at their end. The servers'
own account of their processor time gives the jobs a second of one core each, however many cores the machine has. The
time of a choice is that of this process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from redis.asyncio import Redis

from bench.command import run_command
from bench.report import Aim, Report, progress
from bench.scaling import PAGE
from bench.scaling_cluster import BASE
from bench.scaling_redis import sized_job, used_s
from bench.valkey import running_valkey
from loraplex.contracts.broker.cells import CellSight
from loraplex.contracts.broker.connection import connect
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import AdapterRef, Capacity, Job, WorkerPhase, WorkerState
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import QueueLimits, UsageReport
from loraplex.router.dispatch.cells import Cells

AIMS = {
    "jobs_per_s_of_two_cells_over_one": Aim(at_least=1.8),
    "choice_us_of_two_cells": Aim(at_most=25),
    "choice_us_of_one_cell": Aim(at_most=1),
}
NAMES = ("main", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
# Share of its core that a cell's Redis should use, as in bench.scaling.
_CORE_SHARE = 0.7
_LIMITS = QueueLimits(jobs=1 << 30, tenant_jobs=1 << 30)
# Jobs that are charged together, as a worker's reports are.
_CHARGED = 16


@dataclass(frozen=True)
class Setup:
    """The numbers of jobs of a run, of those that wait meanwhile, and of looks of a router at the cells.

    A job has one of `adapters`, or in one of four cases none. `callers`, which call at once, and `workers` are of each
    cell. `passes` are runs, of which the median counts; `choices` are timed.
    """

    jobs: int = 12_000
    waiting: int = 1_000
    looks: int = 24
    adapters: int = 1_000
    tenants: int = 100
    callers: int = 8
    workers: int = 100
    passes: int = 3
    choices: int = 20_000


QUICK = Setup(jobs=800, waiting=100, looks=4, adapters=200, passes=1, choices=1_000)


def main() -> None:
    """Run the benchmark with the command line's arguments; `--write-docs` writes its tables of the page."""
    run_command("cells", __doc__ or "", lambda quick: measure(QUICK if quick else Setup(), quick), PAGE)


def measure(setup: Setup, quick: bool) -> Report:
    """Measure the servers of one cell and of two, and the time of a choice."""
    runs: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for number in range(setup.passes):
        for cells, found in runs.items():
            progress(f"pass {number + 1}: {setup.jobs} jobs in {cells} cells")
            found.append(_run(setup, cells))
    rows = {cells: {key: median(one[key] for one in found) for key in found[0]} for cells, found in runs.items()}
    choices = {cells: _choice_us(setup, cells) for cells in (1, 2, 4, 8)}
    return Report(
        name="cells",
        command="python -m bench.cells" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup),
        rows=[
            *({"run": "jobs", "cells": cells, **row} for cells, row in rows.items()),
            *({"run": "a choice", "cells": cells, **row} for cells, row in choices.items()),
        ],
        ratios={
            "jobs_per_s_of_two_cells_over_one": rows[2]["jobs/s"] / rows[1]["jobs/s"],
            "choice_us_of_two_cells": choices[2]["us with an adapter"],
            "choice_us_of_one_cell": choices[1]["us with an adapter"],
        },
        aims=AIMS,
    )


def _run(setup: Setup, count: int) -> dict[str, float]:
    with ExitStack() as servers:
        urls = [servers.enter_context(running_valkey()) for _ in range(count)]
        return asyncio.run(_Cluster(setup, urls).run())


class _Cluster:
    """The cells of a run, their queues as a router and a worker of each have them, and the router's rule."""

    def __init__(self, setup: Setup, urls: Sequence[str]) -> None:
        self._setup, self._urls = setup, dict(zip(NAMES, urls, strict=False))
        self._cells = Cells(list(self._urls))
        self._number = 0

    async def run(self) -> dict[str, float]:
        """Return what a job takes of the busiest server, and the jobs a second of all at 70% of their cores."""
        setup = self._setup
        redis = {name: await connect(url) for name, url in self._urls.items()}
        self._queues = {
            name: JobQueue(one, Keys("model", name), limits=_LIMITS, worker_id="w") for name, one in redis.items()
        }
        self._liveness = {name: Liveness(one, Keys("model", name)) for name, one in redis.items()}
        self._ended: dict[str, list[UsageReport]] = {name: [] for name in redis}
        await self._look()
        await self._send(setup.waiting, self._enqueue)
        before = await _used(redis)
        for _ in range(setup.looks):
            await self._look()
            await self._send(setup.jobs // setup.looks, self._pass_one)
        used = {name: after - before[name] for name, after in (await _used(redis)).items()}
        for one in redis.values():
            await one.aclose()
        busiest = max(used.values())
        jobs = setup.jobs // setup.looks * setup.looks
        return {
            "us of the busiest server a job": busiest / jobs * 1e6,
            "us of all servers a job": sum(used.values()) / jobs * 1e6,
            "jobs/s": _CORE_SHARE * jobs / busiest,
        }

    async def _send(self, count: int, call: Callable[[str, Job], Awaitable[None]]) -> None:
        """Make a call for each of so many jobs in the cell that it goes to, in one cell after the other.

        So each server has several callers at once, as one that uses 70% of a core has, whatever this process can send.
        """
        jobs: dict[str, list[Job]] = {name: [] for name in self._queues}
        for _ in range(count):
            self._number += 1
            job = _job(self._setup, self._number)
            jobs[self._cells.choose(job)].append(job)

        async def repeat(name: str, some: Sequence[Job]) -> None:
            for job in some:
                await call(name, job)

        for name, of_cell in jobs.items():
            callers = self._setup.callers
            await asyncio.gather(*(repeat(name, of_cell[number::callers]) for number in range(callers)))

    async def _look(self) -> None:
        """Look at the cells as a router does twice a second; their workers have rows for all jobs."""
        loads = {name: (await liveness.take_census("router")).load for name, liveness in self._liveness.items()}
        waiting = [(_job(self._setup, 0), name) for name, load in loads.items() for _ in range(load.waiting)]
        self._cells.update(
            {("model", name): CellSight(_workers(self._setup), load) for name, load in loads.items()}, waiting
        )

    async def _enqueue(self, name: str, job: Job) -> None:
        await self._queues[name].enqueue(job)

    async def _pass_one(self, name: str, job: Job) -> None:
        """Enqueue a job, claim the next one of its cell, and charge what has ended."""
        await self._enqueue(name, job)
        queue, ended = self._queues[name], self._ended[name]
        reports = tuple(ended[:_CHARGED]) if len(ended) >= _CHARGED else ()
        del ended[: len(reports)]
        claimed = await queue.claim(BASE, Capacity(1, 32, 1 << 20, 1 << 20, 64, ()), reports)
        ended += [UsageReport(job.job_id, job.attempt, 128, ended=True) for job in claimed.jobs]


async def _used(redis: dict[str, Redis]) -> dict[str, float]:
    return {name: await used_s(one) for name, one in redis.items()}


def _choice_us(setup: Setup, count: int) -> dict[str, float]:
    """Return the microseconds of a choice among cells, of a job with an adapter and of one without."""
    cells = Cells(NAMES[:count])
    sights = {("model", name): CellSight(_workers(setup)) for name in NAMES[:count]}
    jobs = [_job(setup, number) for number in range(setup.choices)]
    waiting = [(job, NAMES[at % count]) for at, job in enumerate(jobs[: setup.waiting])]
    began = time.perf_counter()
    cells.update(sights, waiting)
    look_ms = (time.perf_counter() - began) * 1e3
    found: dict[str, float] = {}
    for kind, chosen in (
        ("us with an adapter", [job for job in jobs if job.adapter]),
        ("us without", [job for job in jobs if not job.adapter]),
    ):
        cells.choose(chosen[0])
        began = time.perf_counter()
        for job in chosen:
            cells.choose(job)
        found[kind] = (time.perf_counter() - began) / len(chosen) * 1e6
    return {**found, "ms of a look": look_ms}


def _workers(setup: Setup) -> list[WorkerState]:
    """Return the workers of a cell, with rows for all jobs."""
    kinds: dict[str, Any] = {"U32": 0, "U63": 0, "str": ""}
    empty = {name: kinds[kind] for name, kind in WorkerState.__annotations__.items() if kind in kinds}
    sizes = {"rows_limit": 2 * setup.jobs // setup.workers, "max_tokens": 1 << 20, "max_rank": 64, "base_digest": BASE}
    state = WorkerState(phase=WorkerPhase.SERVING, adapters=(), **{**empty, **sizes})
    return [replace(state, worker_id=f"w{number}", incarnation=f"w{number}") for number in range(setup.workers)]


def _job(setup: Setup, number: int) -> Job:
    which = number * 7919 % setup.adapters
    adapter = AdapterRef(f"tenants/t/adapters/a{which}", f"sha256:{which:064x}", 16, 1 << 20) if number % 4 else None
    return sized_job(number, setup.tenants, adapter)


if __name__ == "__main__":
    main()
