"""Jobs whose adapters the store does not deliver now: which of them wait for it, and which end."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.contracts.broker.messages import AdapterRef
from loraplex.worker.engine_api import Failure
from loraplex.worker.io import intake
from loraplex.worker.io.adapters.fetch import FetchFailedError
from loraplex.worker.io.intake import Intake
from loraplex.worker.io.local_jobs import LocalJobs
from tests.worker.io.relayed_worker import job

ROWS = 4
GONE = Failure("NOT_FOUND", "ADAPTER_GONE", "deleted", "adapter")
DOWN = Failure("UNAVAILABLE", "STORE_DOWN", "no answer", "adapter")


async def test_jobs_wait_for_a_store_that_restarts_unless_they_keep_others_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "FETCH_PAUSE_S", 0.0)
    failures = {"gone": GONE, "here": DOWN}
    asked, outcomes, news = Counter[str](), dict[str, str](), asyncio.Event()

    class Pin:
        async def fetch(self, refs: list[AdapterRef], tenant: str) -> list[Path]:
            asked[refs[0].revision] += 1
            news.set()
            if refs[0].revision in failures:
                raise FetchFailedError(failures[refs[0].revision])
            return [Path("adapter")]

        async def invocation_of(self, digest: str) -> tuple[int, ...]:
            return ()

    async def until(count: int) -> None:
        while len(outcomes) < count:
            news.clear()
            await news.wait()

    def fail(local: Any, failure: Failure) -> None:
        outcomes[local.job.job_id] = failure.reason
        jobs.remove(local.job.job_id, 1)
        news.set()

    def hand_over(local: Any) -> None:
        outcomes[local.job.job_id] = "runs"
        news.set()

    jobs = LocalJobs()
    results: Any = SimpleNamespace(jobs=jobs, limits=SimpleNamespace(rows=ROWS), fail=fail)
    fetcher: Any = SimpleNamespace(disk_pin=Pin, sets=SimpleNamespace(note=lambda *_: None))
    unused: Any = None
    results.links = None
    prepared = Intake("sha256:0", unused, unused, fetcher, results, unused, unused)
    monkeypatch.setattr(prepared, "_hand_over", hand_over)

    def start(job_id: str, revision: str = "here", emitted: tuple[int, ...] = (), *, last_try: bool = True) -> None:
        adapter = AdapterRef(revision, "sha256:a", rank=1, weight_bytes=1)
        prepared.prepare(jobs.add(replace(job(job_id), adapter=adapter, emitted={0: emitted}, last_try=last_try)))

    start("begun", emitted=(5,))
    start("gone", "gone")
    waiting = [f"new-{number}" for number in range(2 * ROWS - 2)]
    for job_id in waiting:
        start(job_id)
    async with asyncio.timeout(60):
        await until(1)
        asked.clear()
        while asked["here"] < 4 * len(waiting):
            news.clear()
            await news.wait()
        assert outcomes == {"gone": "ADAPTER_GONE"}
        start("one too many")
        await until(2)  # one of them makes room
        del failures["here"]
        await until(2 * ROWS + 1)
        assert Counter(outcomes.values()) == {"ADAPTER_GONE": 1, "STORE_DOWN": 1, "runs": 2 * ROWS - 1}
        assert outcomes["begun"] == "runs"
        for local in jobs.all():
            jobs.remove(local.job.job_id, 1)
        start("another worker may", emitted=(5,), last_try=False)
        failures["here"] = DOWN
        monkeypatch.setattr(intake, "FETCH_RETRY_S", 0.0)
        start("last")
        await until(2 * ROWS + 3)
        assert outcomes["last"] == outcomes["another worker may"] == "STORE_DOWN"
    await prepared.close()
