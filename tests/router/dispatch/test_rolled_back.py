"""A Redis that a failover rolled back, or that lost its data: what it still has of a job, and the job's place again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from redis.asyncio import Redis

from loraplex.contracts.broker.messages import Job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import KeyTerms, Placement, QueueState
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.links import DispatchTiming
from tests.router.recording_link import KEYS, ROOMY, RecordingLink, claim, dispatched, frame, job


async def test_the_older_attempt_that_a_replica_still_has(redis: Redis) -> None:
    queue = JobQueue(redis, KEYS)
    timing = DispatchTiming(claim_grace_s=0.05, look_s=0.01)
    dispatcher = Dispatcher(lambda *_: queue, lambda *_: Placement(), timing=timing)
    first, second, last = RecordingLink("w1"), RecordingLink("w2"), RecordingLink("w3")
    async with dispatched(dispatcher, job()) as routed:
        older = await claim(queue)
        dispatcher.receive_claims(first, [("j", 1)])
        dispatcher.receive_frame(first, frame(0, 5, 6))
        dispatcher.receive_frame(first, frame(2, returned=True))
        async with asyncio.timeout(60):
            while not await queue.count_waiting():  # noqa: ASYNC110 — Redis tells nobody
                await asyncio.sleep(0.01)
        # The failover: of all this the replica has attempt 1, which waits.
        await redis.flushall()
        await queue.enqueue(older)
        watching = asyncio.create_task(dispatcher.redispatch_missing())
        try:
            async with asyncio.timeout(60):
                while await queue.look_up([("j", 2)]) == [QueueState.ABSENT]:  # noqa: ASYNC110 — as above
                    await asyncio.sleep(0.01)
        finally:
            watching.cancel()
        again = await claim(queue)
        assert (again.attempt, again.emitted) == (3, {0: (5, 6)})
        assert await queue.count_waiting() == 0
        # Somebody had claimed the older one meanwhile.
        dispatcher.receive_claims(second, [("j", 1)])
        dispatcher.receive_frame(second, frame(0, 5, 6, 7))
        assert second.sent == [("cancel", "j", 1), ("cancel", "j", 1)]
        dispatcher.receive_claims(last, [("j", 3)])
        dispatcher.receive_frame(last, frame(2, 8, attempt=3))
        assert routed.choices[0].emitted == [5, 6, 8]
    await dispatcher.drain_tasks()
    assert await redis.exists(KEYS.job("j")) == 0


async def test_a_job_that_only_waited_is_a_newcomer_of_its_key_again(redis: Redis) -> None:
    """Else what waited when Redis lost its data would go before the newcomers of all tenants."""

    def place(job: Job, cell: str) -> Placement:
        return Placement(key=KeyTerms("k", 2.0)) if job.attempt == 1 else Placement()

    queue, link = JobQueue(redis, KEYS), RecordingLink("w")
    timing = DispatchTiming(claim_grace_s=0.05, look_s=0.01)
    dispatcher = Dispatcher(lambda *_: queue, place, timing=timing)
    async with dispatched(dispatcher, job("ran")), dispatched(dispatcher, job("waits")):
        await queue.claim("sha256:0", replace(ROOMY, rows=1))
        dispatcher.receive_claims(link, [("ran", 1)])
        await redis.flushall()
        dispatcher.receive_frame(link, frame(0, job_id="ran", returned=True))
        watching = asyncio.create_task(dispatcher.redispatch_missing())
        async with asyncio.timeout(60):
            while await queue.count_waiting() < 2:  # noqa: ASYNC110 — Redis tells nobody
                await asyncio.sleep(0.01)
        watching.cancel()
        assert await redis.zrange(f"{KEYS.prefix}again", 0, -1) == [b"ran"]
        assert await redis.hget(f"{KEYS.prefix}queue:acme/keys", "jobs:k") == b"1"
    await dispatcher.drain_tasks()
