"""Attempts, binding, rewinds and recovery: the dispatcher over a real queue, with links that record what they get."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.messages import AdapterRef, Job, WeightedRef
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import Placement
from loraplex.contracts.options import Encode, FinishReason, StoppingParams
from loraplex.router.dispatch.dispatcher import WEIGHTED_SETS, Dispatcher, check_weighted_sets
from loraplex.router.dispatch.links import DispatchTiming, Frame
from loraplex.router.metrics import RouterMetrics
from loraplex.runtime.rpc.errors import CallError, Exhausted, Internal, Unavailable
from tests.router.recording_link import KEYS, RecordingLink, claim, dispatched, frame, job, read


async def look_until_lost(dispatcher: Dispatcher) -> None:
    """Look at a Redis that knows nobody until a job's worker counts as lost."""
    async with asyncio.timeout(30):
        while any(routed.job.attempt == 1 for routed in dispatcher.jobs):
            dispatcher.update_live_workers(set())
            await asyncio.sleep(0.1)


async def test_a_job_runs_on_the_worker_that_claimed_it(dispatcher: Dispatcher, queue: JobQueue) -> None:
    link = RecordingLink("w")
    dispatcher.link_up(link, [])
    async with dispatched(dispatcher, job()) as routed:
        assert (await claim(queue)).job_id == "j"
        dispatcher.receive_claims(link, [("j", 1)])
        dispatcher.receive_frame(link, frame(0, 5, 6))
        dispatcher.receive_frame(link, frame(2, 7, finish=FinishReason.END))
        assert await read(routed) == [5, 6, 7]
    await dispatcher.drain_tasks()
    assert link.sent == [("ack", "j", 1)]


async def test_frames_of_a_worker_that_is_not_bound_never_count(dispatcher: Dispatcher) -> None:
    bound, other = RecordingLink("bound"), RecordingLink("other")
    async with dispatched(dispatcher, job()) as routed:
        dispatcher.receive_claims(bound, [("j", 1)])
        dispatcher.receive_frame(other, frame(0, 99))
        dispatcher.receive_frame(bound, frame(0, 5, attempt=2))
        assert routed.choices[0].emitted == []
        assert other.sent == [("cancel", "j", 1)]
        assert bound.sent == [("cancel", "j", 2)]


async def test_a_gap_asks_for_a_rewind_and_repeats_count_once(dispatcher: Dispatcher) -> None:
    link = RecordingLink("w")
    async with dispatched(dispatcher, job()) as routed:
        dispatcher.receive_frame(link, frame(0, 5))
        dispatcher.receive_frame(link, frame(2, 7))
        assert link.sent == [("rewind", "j", 1, 0, 1)]
        dispatcher.receive_frame(link, frame(0, 5, 6))
        dispatcher.receive_frame(link, frame(1, 6, 7))
        dispatcher.receive_frame(link, frame(0, 5))
        assert routed.choices[0].emitted == [5, 6, 7]


async def test_a_lost_worker_s_job_goes_on_from_its_last_id(dispatcher: Dispatcher, queue: JobQueue) -> None:
    first, second = RecordingLink("first"), RecordingLink("second")
    dispatcher.link_up(first, [])
    async with dispatched(dispatcher, job()) as routed:
        await claim(queue)
        dispatcher.receive_frame(first, frame(0, 5, 6))
        dispatcher.link_down(first)
        again = await claim(queue)
        assert (again.attempt, again.emitted, again.prompt_ids) == (2, {0: (5, 6)}, (1, 2))
        dispatcher.receive_frame(first, frame(2, 66))  # it lives after all, too late
        dispatcher.receive_frame(second, frame(2, 7, attempt=2, finish=FinishReason.LENGTH))
        assert await read(routed) == [5, 6, 7]
        assert routed.continuations == 1
    assert ("cancel", "j", 1) in first.sent


async def test_a_vector_is_taken_once_and_from_the_worker_that_has_the_attempt(
    dispatcher: Dispatcher, queue: JobQueue
) -> None:
    first, second = RecordingLink("first"), RecordingLink("second")
    dispatcher.link_up(first, [])
    async with dispatched(dispatcher, replace(job(max_tokens=0), encode=Encode("embed"))) as routed:
        assert (await claim(queue)).encode == Encode("embed")
        dispatcher.receive_claims(first, [("j", 1)])
        dispatcher.receive_frame(first, frame(0, returned=True))  # its engine died before a step gave anything
        assert (await claim(queue)).attempt == 2
        dispatcher.receive_claims(second, [("j", 2)])
        dispatcher.receive_frame(first, vector_frame(1, 9.0))
        assert not routed.ended
        dispatcher.receive_frame(second, vector_frame(2, 0.5))
        dispatcher.receive_frame(second, vector_frame(2, 9.0))
        assert await read(routed) == []
        assert routed.choices[0].vector == (0.5, -0.5)
        assert (routed.cached_tokens, routed.continuations) == (3, 1)
    assert second.sent[0] == ("ack", "j", 2)


def vector_frame(attempt: int, value: float) -> Frame:
    return Frame("j", attempt, 0, (), finish=FinishReason.LENGTH, adapter_ms=1.0, cached_tokens=3, vector=(value, -0.5))


async def test_a_link_that_comes_back_in_time_keeps_its_jobs(dispatcher: Dispatcher, queue: JobQueue) -> None:
    link, again = RecordingLink("w"), RecordingLink("w")
    dispatcher.link_up(link, [])
    async with dispatched(dispatcher, job()) as routed:
        await claim(queue)
        dispatcher.receive_frame(link, frame(0, 5))
        dispatcher.link_down(link)
        dispatcher.link_up(again, [("j", 1), ("unknown", 4)])
        assert again.sent == [("rewind", "j", 1, 0, 1), ("cancel", "unknown", 4)]
        await dispatcher.drain_tasks()
        assert (routed.job.attempt, routed.link) == (1, again)


async def test_a_worker_that_comes_back_without_a_job_has_lost_it(dispatcher: Dispatcher, queue: JobQueue) -> None:
    link = RecordingLink("w")
    dispatcher.link_up(link, [])
    async with dispatched(dispatcher, job()):
        await claim(queue)
        dispatcher.receive_claims(link, [("j", 1)])
        dispatcher.link_up(RecordingLink("w"), [])
        assert (await claim(queue)).attempt == 2


async def test_a_silent_worker_whose_key_lapsed_is_lost_though_its_link_is_open(
    dispatcher: Dispatcher, queue: JobQueue
) -> None:
    link = RecordingLink("w")
    link.heard_at = -math.inf
    dispatcher.link_up(link, [])
    async with dispatched(dispatcher, job()):
        await claim(queue)
        dispatcher.receive_claims(link, [("j", 1)])
        dispatcher.update_live_workers({"w-1"})
        dispatcher.update_live_workers(set())  # once is no sign: Redis may have just lost its data
        dispatcher.update_live_workers({"w-1"})
        await look_until_lost(dispatcher)
        assert (await claim(queue)).attempt == 2


async def test_a_worker_that_is_cut_off_from_redis_alone_keeps_its_jobs(redis: Redis, queue: JobQueue) -> None:
    timing = DispatchTiming(liveness_grace_s=0.0)
    dispatcher = Dispatcher(lambda *_: queue, lambda *_: Placement(), timing=timing)
    link = RecordingLink("w")
    dispatcher.link_up(link, [])
    async with dispatched(dispatcher, job()) as routed:
        dispatcher.receive_claims(link, [("j", 1)])
        dispatcher.update_live_workers(set())
        dispatcher.receive_frame(link, frame(0, 5))
        assert (routed.job.attempt, routed.link) == (1, link)
        link.heard_at -= timing.silent_s
        dispatcher.update_live_workers(set())
        assert routed.job.attempt == 2
    await dispatcher.drain_tasks()


async def test_jobs_that_no_worker_can_claim_end_and_others_go_on(dispatcher: Dispatcher, redis: Redis) -> None:
    link = RecordingLink("w")
    dispatcher.link_up(link, [])
    async with dispatched(dispatcher, job("waits")) as waits, dispatched(dispatcher, job("runs")) as runs:
        dispatcher.receive_claims(link, [("runs", 1)])
        dispatcher.fail_waiting("other", Unavailable)
        assert not waits.ended
        dispatcher.fail_waiting("tiny", Unavailable)
        with pytest.raises(Unavailable, match="tiny"):
            await read(waits)
        assert runs.failure is None
        dispatcher.receive_claims(link, [("waits", 1)])  # it was claimed after all
        assert link.sent == [("cancel", "waits", 1)]
    await dispatcher.drain_tasks()
    assert await redis.zscore(KEYS.waiting, "waits") is None


async def test_claims_that_never_show_are_dispatched_again_with_a_line_for_all_of_a_look(
    queue: JobQueue, caplog: pytest.LogCaptureFixture
) -> None:
    timing = DispatchTiming(look_s=0.01, claim_grace_s=0.01)
    dispatcher = Dispatcher(lambda *_: queue, lambda *_: Placement(), timing=timing)
    async with dispatched(dispatcher, job()), dispatched(dispatcher, job("k")):
        assert (await claim(queue)).attempt == 1  # of both, and their worker dies before it says so
        watch = asyncio.create_task(dispatcher.redispatch_missing())
        assert (await claim(queue)).attempt == 2
        watch.cancel()
    assert caplog.messages[0] == "2 jobs were claimed and never bound; they are dispatched again"


async def test_a_returned_job_goes_on_elsewhere(dispatcher: Dispatcher, queue: JobQueue) -> None:
    link = RecordingLink("w")
    async with dispatched(dispatcher, job()):
        await claim(queue)
        dispatcher.receive_frame(link, frame(0, 5))
        dispatcher.receive_frame(link, frame(1, returned=True))
        again = await claim(queue)
        assert (again.attempt, again.emitted) == (2, {0: (5,)})


async def test_leaving_stops_the_work_and_empties_the_queue(dispatcher: Dispatcher, redis: Redis) -> None:
    link = RecordingLink("w")
    async with dispatched(dispatcher, job("waits")), dispatched(dispatcher, job()):
        dispatcher.receive_claims(link, [("j", 1)])
    await dispatcher.drain_tasks()
    assert link.sent == [("cancel", "j", 1)]
    assert KEYS.job("waits").encode() not in await redis.keys("*")
    assert await redis.zscore(KEYS.waiting, "waits") is None
    dispatcher.receive_claims(link, [("waits", 1)])  # claimed in the same moment
    assert link.sent[1:] == [("cancel", "waits", 1)]


async def test_a_failure_ends_the_reader_with_it(dispatcher: Dispatcher) -> None:
    link = RecordingLink("w")
    async with dispatched(dispatcher, job()) as routed:
        dispatcher.receive_frame(link, Frame("j", 1, 0, (), failure=Internal("NaN", reason="NAN_LOGITS")))
        with pytest.raises(Internal, match="NaN"):
            await read(routed)
    assert link.sent == [("ack", "j", 1)]


async def test_ids_come_once_and_in_order_whatever_the_workers_do(dispatcher: Dispatcher, queue: JobQueue) -> None:
    """Workers that lose, repeat and reorder frames, go away, come back late, and give jobs back."""
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    truth = list(range(1000, 1120))
    async with dispatched(dispatcher, job(max_tokens=len(truth))) as routed:
        stale: list[tuple[RecordingLink, Frame]] = []
        while not routed.ended:
            claimed = await claim(queue)
            link = RecordingLink(f"w{claimed.attempt}")
            dispatcher.link_up(link, [])
            at = len(claimed.emitted.get(0, ()))
            assert list(claimed.emitted.get(0, ())) == truth[:at]
            for _ in range(rng.randrange(1, 12)):
                start = max(0, min(at, routed.emitted_tokens) - rng.randrange(3) + rng.randrange(3))
                ids = truth[start : start + rng.randrange(1, 6)]
                done = start + len(ids) == len(truth)
                sent = frame(start, *ids, attempt=claimed.attempt, finish=FinishReason.LENGTH if done else None)
                dispatcher.receive_frame(link, sent)
                stale.append((link, frame(start, *([7] * len(ids)), attempt=claimed.attempt)))
                old_link, old = rng.choice(stale)
                if old.attempt < claimed.attempt:
                    dispatcher.receive_frame(old_link, old)
                if routed.ended:
                    break
            if rng.random() < 0.5 and not routed.ended:
                dispatcher.receive_frame(link, frame(routed.emitted_tokens, attempt=claimed.attempt, returned=True))
            else:
                dispatcher.link_up(RecordingLink(link.worker_id), [])
        assert routed.continuations >= 3
        assert await read(routed) == truth


ONE = AdapterRef("r", "sha256:1", 1, 1)
WEIGHTED = Job("j", "acme", "tiny", "sha256:0", "here", (1, 2), StoppingParams(100), request_id="j", adapter=ONE)


def of_set(number: int) -> Job:
    """Return a job of a set with a digest of its own."""
    return replace(WEIGHTED, adapter=replace(ONE, digest=f"set {number}", parts=(WeightedRef(ONE, 0.5),)))


def test_a_tenants_sets_are_bounded_and_nothing_else_is() -> None:
    others = [of_set(number) for number in range(WEIGHTED_SETS)] * 3
    new = of_set(WEIGHTED_SETS)
    with pytest.raises(Exhausted, match="acme uses 16 weighted sets") as caught:
        check_weighted_sets(new, others)
    assert caught.value.reason == "WEIGHTED_SETS_FULL"
    check_weighted_sets(new, others[: WEIGHTED_SETS - 1])
    for allowed in (
        of_set(3),
        WEIGHTED,
        replace(WEIGHTED, adapter=None),
        replace(new, tenant="globex"),
        replace(new, resumed=True),
    ):
        check_weighted_sets(allowed, others)


TOO_LARGE = Unavailable("no live worker takes it", reason="NO_WORKER_FITS")


def dispatcher_of(queue: JobQueue, errors: dict[str, CallError], grace_s: float) -> Dispatcher:
    def why_unservable(job: Job) -> CallError | None:
        return errors.get(job.job_id)

    timing = DispatchTiming(unservable_grace_s=grace_s)
    return Dispatcher(lambda *_: queue, lambda *_: Placement(), RouterMetrics(), timing, why_unservable=why_unservable)


async def test_what_nobody_can_take_ends_and_leaves_the_queue(redis: Redis) -> None:
    queue, errors = JobQueue(redis, KEYS), dict[str, CallError]()
    dispatcher = dispatcher_of(queue, errors, grace_s=0.0)
    async with dispatched(dispatcher, job("large")) as large, dispatched(dispatcher, job("small")) as small:
        dispatcher.update_live_workers({"w"})
        assert not large.ended
        errors["large"] = TOO_LARGE
        dispatcher.update_live_workers({"w"})
        with pytest.raises(Unavailable, match="no live worker takes it"):
            await read(large)
        assert not small.ended
    await dispatcher.drain_tasks()
    assert await queue.count_waiting() == 0


async def test_a_job_that_waits_for_long_is_sealed_anew_again_and_again(redis: Redis) -> None:
    """Else workers refuse it, and report an attack."""
    renewed, placement = asyncio.Queue[tuple[str, Placement]](), Placement(weight=2.0)

    class Recording(JobQueue):
        async def renew(self, job: Job, placement: Placement) -> None:
            renewed.put_nowait((job.job_id, placement))

    queue, timing = Recording(redis, KEYS), DispatchTiming(look_s=0.01, seal_s=0.03)
    dispatcher = Dispatcher(lambda *_: queue, lambda *_: placement, timing=timing)
    watch = asyncio.create_task(dispatcher.redispatch_missing())
    async with dispatched(dispatcher, job()), asyncio.timeout(60):
        assert [await renewed.get() for _ in range(2)] == [("j", placement)] * 2
    watch.cancel()


async def test_a_worker_that_restarts_has_a_moment_to_come_back(redis: Redis) -> None:
    dispatcher = dispatcher_of(JobQueue(redis, KEYS), {"j": TOO_LARGE}, grace_s=1e9)
    async with dispatched(dispatcher, job()) as routed:
        for _ in range(3):
            dispatcher.update_live_workers(set())
        assert not routed.ended


async def test_a_running_job_goes_on_until_its_worker_gives_it_back(redis: Redis) -> None:
    queue = JobQueue(redis, KEYS)
    dispatcher, link = dispatcher_of(queue, {"j": TOO_LARGE}, grace_s=0.0), RecordingLink("w")
    async with dispatched(dispatcher, job()) as routed:
        await claim(queue)
        dispatcher.receive_frame(link, frame(0, 5))
        dispatcher.update_live_workers({"w"})
        assert not routed.ended
        dispatcher.receive_frame(link, frame(1, returned=True))
        dispatcher.update_live_workers(set())
        assert routed.failure is TOO_LARGE
    await dispatcher.drain_tasks()
    assert await queue.count_waiting() == 0
