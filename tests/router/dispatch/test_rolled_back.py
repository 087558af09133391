"""A Redis that a failover rolled back: an older attempt there blocks no newer attempt, and its tokens are refused."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from broker.queue import JobQueue
from broker.terms import Placement, QueueState
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.timing import DispatchTiming
from tests.router.recording_link import KEYS, RecordingLink, claim, dispatched, frame, job


async def test_the_older_attempt_that_a_replica_still_has(redis: Redis) -> None:
    queue = JobQueue(redis, KEYS)
    timing = DispatchTiming(claim_grace_s=0.05, look_s=0.01)
    dispatcher = Dispatcher(lambda model: queue, lambda job: Placement(), timing=timing)
    first, second, last = RecordingLink("w1"), RecordingLink("w2"), RecordingLink("w3")
    async with dispatched(dispatcher, job()) as routed:
        older = await claim(queue)
        dispatcher.receive_claims(first, [("j", 1)])
        dispatcher.receive_frame(first, frame(0, 5, 6))
        dispatcher.receive_frame(first, frame(2, returned=True))
        async with asyncio.timeout(20):
            while not await queue.count_waiting():  # noqa: ASYNC110 — Redis tells nobody
                await asyncio.sleep(0.01)
        # The failover: of all this the replica has attempt 1, which waits.
        await redis.flushall()
        await queue.enqueue(older)
        watching = asyncio.create_task(dispatcher.redispatch_missing())
        try:
            async with asyncio.timeout(20):
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
