"""Test liveness in Redis: workers by their keys, the room of those that are gone, and a server that is another."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import (
    AdapterTiers,
    Capacity,
    WorkerPhase,
    WorkerState,
    decode_record,
    encode_record,
)
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import WORKER_TTL_MS, Placement
from tests.broker.clocked_queue import LIBRARY_ON_TEST_CLOCK, Clock, make_job

KEYS = Keys("tiny", "main")
ROOMY = Capacity(rows=8, rows_limit=8, tokens=10_000, max_tokens=4096, max_rank=64)


def worker(worker_id: str) -> WorkerState:
    kinds = WorkerState.__annotations__
    numbers: dict[str, Any] = dict.fromkeys((name for name, kind in kinds.items() if kind in {"U32", "U63"}), 3)
    return WorkerState(
        worker_id=worker_id,
        incarnation=f"{worker_id}-inc",
        phase=WorkerPhase.SERVING,
        model="tiny",
        base_digest="sha256:0",
        adapters=("sha256:1", "sha256:2"),
        host="here",
        tiers=AdapterTiers(**{name: at for at, name in enumerate(AdapterTiers.__dataclass_fields__, 1)}),
        sets={"sha256:2": (("sha256:3", 0.5), ("sha256:4", -1.0))},
        **numbers,
    )


def make_queue(redis: Redis, worker_id: str = "") -> JobQueue:
    return JobQueue(redis, KEYS, worker_id=worker_id, library=LIBRARY_ON_TEST_CLOCK)


async def want_adapter(redis: Redis) -> None:
    """Let a job come and go, so that later ones of its adapter are held for the workers that they prefer."""
    await make_queue(redis).enqueue(make_job("before", "a", adapter="sha256:x"))
    await make_queue(redis).finish("before", 1)


@pytest.fixture
def liveness(redis: Redis, clock: Clock) -> Liveness:
    return Liveness(redis, KEYS, library=LIBRARY_ON_TEST_CLOCK)


async def test_workers_live_as_long_as_they_beat(redis: Redis, liveness: Liveness) -> None:
    for name in ("w2", "w1"):
        await liveness.beat(worker(name))
    assert await liveness.live_workers() == [worker("w1"), worker("w2")]
    assert 0 < await redis.pttl(KEYS.worker("w1-inc")) <= WORKER_TTL_MS
    await liveness.declare_dead("w1-inc")
    assert [state.worker_id for state in await liveness.live_workers()] == ["w2"]
    await redis.delete(KEYS.worker("w2-inc"))  # as its time to live would
    assert await liveness.live_workers() == []
    assert await redis.hlen(KEYS.workers) == 0


async def test_a_worker_that_is_gone_lapses_in_its_time_after_the_clock_went_back(
    redis: Redis, clock: Clock, liveness: Liveness
) -> None:
    await want_adapter(redis)
    await liveness.beat(worker("w"))
    await make_queue(redis, "w").claim("sha256:0", ROOMY)
    await liveness.take_census("router")
    await redis.pexpire(KEYS.worker("w-inc"), 600_000)  # as the clock that goes back does it
    await clock.advance(-600_000)
    await liveness.take_census("router")
    assert 0 < await redis.pttl(KEYS.worker("w-inc")) <= WORKER_TTL_MS
    await make_queue(redis).enqueue(make_job("j", "a", adapter="sha256:x"), Placement(prefer=("w",)))
    assert [one.job_id for one in (await make_queue(redis, "other").claim("sha256:0", ROOMY)).jobs] == ["j"]


@pytest.mark.parametrize("lapses", [False, True])
async def test_nothing_waits_for_a_worker_that_is_gone(redis: Redis, liveness: Liveness, lapses: bool) -> None:
    """Free rows go with their worker, and its wake-ups go to another one."""
    await want_adapter(redis)
    queues = {name: make_queue(redis, name) for name in ("w1", "w2")}
    for name, queue in queues.items():
        await liveness.beat(worker(name))
        await queue.claim("sha256:0", ROOMY)
    job = make_job("j", "a", adapter="sha256:x")
    await make_queue(redis).enqueue(job, Placement(prefer=("w1",)))
    other = asyncio.create_task(queues["w2"].wait_for_work(30))
    assert (await queues["w2"].claim("sha256:0", ROOMY)).hold_ms > 0
    if lapses:
        await redis.delete(KEYS.worker("w1-inc"))
        await liveness.take_census()
    else:
        await liveness.declare_dead("w1-inc")
    assert await other
    assert [one.job_id for one in (await queues["w2"].claim("sha256:0", ROOMY)).jobs] == ["j"]
    # The job is not held for that worker any more.
    await make_queue(redis).enqueue(make_job("k", "a", adapter="sha256:x"), Placement(prefer=("w1",)))
    assert await queues["w2"].wait_for_work(30)
    claimed = await queues["w2"].claim("sha256:0", ROOMY)
    assert [one.job_id for one in claimed.jobs] == ["k"]


async def test_a_census_reads_a_workers_adapters_once(redis: Redis, liveness: Liveness) -> None:
    adapters = tuple(f"sha256:{number:064x}" for number in range(64))
    states = [replace(worker(f"w{number:02}"), adapters=adapters) for number in range(32)]

    async def look() -> int:
        """Return how many bytes a census has taken, which must tell the workers' counts and adapters."""
        for state in states:
            await liveness.beat(state)
        before = int((await redis.info("stats"))["total_net_output_bytes"])
        census = await liveness.take_census("router")
        assert census.workers == [
            replace(
                state, adapters=tuple(digest[-16:] for digest in state.adapters), sets={}, steps=0, tiers=AdapterTiers()
            )
            for state in states
        ]
        return int((await redis.info("stats"))["total_net_output_bytes"]) - before

    await look()
    states = [replace(state, rows_running=number, blocks_free=number) for number, state in enumerate(states)]
    states[7] = replace(states[7], adapters=adapters[1:])
    assert await look() < 32 * 100 + 2 * len(encode_record(states[7])) + 5_000  # of INFO
    await liveness.declare_dead(states.pop().incarnation)
    await look()


async def test_a_look_at_known_workers_takes_one_round_trip(
    redis: Redis, liveness: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, execute = list[str](), redis.execute_command

    async def noted(*command: Any, **options: Any) -> Any:
        sent.append(command[0])
        return await execute(*command, **options)  # type: ignore[no-untyped-call]  # theirs

    await liveness.beat(worker("w"))
    await liveness.take_census()
    await liveness.beat(replace(worker("w"), rows_running=1))
    monkeypatch.setattr(redis, "execute_command", noted)
    assert [state.rows_running for state in (await liveness.take_census()).workers] == [1]
    assert sent == ["FCALL"]


async def test_many_routers_share_one_look_at_the_workers(redis: Redis) -> None:
    async def calls() -> int:
        return sum(of["calls"] for of in (await redis.info("commandstats")).values())

    liveness = [Liveness(redis, KEYS) for _ in range(40)]
    for number in range(100):
        await liveness[0].beat(worker(f"w{number:02}"))
        await redis.pexpire(KEYS.worker(f"w{number:02}-inc"), 600_000)
    await asyncio.gather(*(one.take_census(f"router{number}") for number, one in enumerate(liveness)))
    before = await calls()
    await asyncio.gather(*(one.take_census(f"router{number}") for number, one in enumerate(liveness)))
    assert await calls() - before < 100 * len(liveness) / 2
    await liveness[0].beat(worker("new"))
    assert [state.worker_id for state in (await liveness[1].take_census()).workers[:2]] == ["new", "w00"]
    await liveness[0].declare_dead("w00-inc")
    assert [state.worker_id for state in (await liveness[1].take_census()).workers[:2]] == ["new", "w01"]


async def test_an_incarnation_that_ends_after_the_next_one_began_takes_no_room(
    redis: Redis, liveness: Liveness
) -> None:
    queue = make_queue(redis, "w")
    await redis.hset(KEYS.workers, "older", "w")  # its key has lapsed
    await liveness.beat(worker("w"))
    await queue.claim("sha256:0", ROOMY)
    assert [state.incarnation for state in await liveness.live_workers()] == ["w-inc"]
    assert await redis.hexists(KEYS.prefix + "rooms", "w")


async def test_a_server_that_lost_its_data_is_another_one(redis: Redis, clock: Clock, liveness: Liveness) -> None:
    first = await liveness.take_census()
    assert (await liveness.take_census()).server == first.server
    await redis.flushall()
    await clock.advance(0)  # however soon it is seen
    assert (await liveness.take_census()).server != first.server


def test_a_worker_state_survives_its_bytes() -> None:
    assert decode_record(WorkerState, encode_record(worker("w"))) == worker("w")


async def test_a_beat_answers_the_routers_that_live(liveness: Liveness, clock: Clock) -> None:
    assert await liveness.beat(worker("w")) == []
    await liveness.take_census("10.0.0.1:1")
    await clock.advance(1_000)
    await liveness.take_census("10.0.0.2:1")
    assert await liveness.beat(worker("w")) == ["10.0.0.1:1", "10.0.0.2:1"]
    for _ in range(2):
        await clock.advance(1_000)
        await liveness.take_census("10.0.0.2:1")
    assert await liveness.beat(worker("w")) == ["10.0.0.2:1"]
    # While no router beats, Redis may have been away: all of them may live.
    await clock.advance(10_000)
    assert await liveness.beat(worker("w")) == ["10.0.0.2:1"]
