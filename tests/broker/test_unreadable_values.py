"""Values in Redis that no function has written: one of them stops no other job."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import AdapterRef
from loraplex.contracts.broker.queue import JobQueue, QuarantinedError
from loraplex.contracts.broker.terms import LOOKS_PER_CHECK, KeyTerms, Placement, QueueLimits, UsageReport
from tests.broker.queued_jobs import KEYS, ROOMY, job
from tests.trials.fuzz.queue_payloads import STATE

WAITING = ("a1", "b1", "c1")
# Texts that are no number, no packed value, or one that compares with nothing.
_TEXTS = (b"", b"?", b"nan", b"1e999", b"\xff" * 40)
# Kinds of keys with packed values; jobs whose fields are changed, and the one whose facts are changed one by one.
_PACKED = ("charged", "suspects", "deaths", "totals")
_CHANGED_JOBS, _CHANGED_FULLY = ("a1", "c1"), ("a1", b"facts")
# Returns what comes of a packed text when one of its values is of another type, no number, negative, or left out.
_VARIANTS = """
local values, made = {cmsgpack.unpack(ARGV[1])}, {}
local others = {0 / 0, -1, math.huge, false}
local function keep(of, key)
  local former = of[key]
  for _, other in ipairs({type(former) == 'number' and 'x' or 7, others[#made % 4 + 1]}) do
    of[key] = other
    made[#made + 1] = cmsgpack.pack(unpack(values))
  end
  of[key] = former
end
for i = 1, #values do
  if type(values[i]) == 'table' then for key in pairs(values[i]) do keep(values[i], key) end else keep(values, i) end
end
if #values > 1 then made[#made + 1] = cmsgpack.pack(unpack(values, 1, #values - 1)) end
return made"""


@dataclass(frozen=True)
class Fault:
    """A change of one value; `spoils` is the job that it may belong to."""

    name: str
    commands: tuple[tuple[Any, ...], ...]
    spoils: str = ""


async def _fill(redis: Redis) -> None:
    """Let jobs wait, run and be suspect, for two workers, one of which has just claimed."""
    queue, liveness = JobQueue(redis, KEYS, worker_id="w"), Liveness(redis, KEYS)
    await liveness.beat(STATE)
    await liveness.take_census("127.0.0.1:1")
    await queue.enqueue(job("s1", tenant="s", strikes=1))
    await queue.enqueue(job("r1", tenant="r"))
    for _ in range(2):
        await queue.claim("sha256:0", ROOMY)
    await queue.record_death("k", "sha256:k", "k1")
    await queue.enqueue(job("a1", tenant="a", adapter=AdapterRef("r", "sha256:x", 8, 1), deadline_ms=60_000))
    await queue.enqueue(job("b1", tenant="b", weight=2.0), Placement(key=KeyTerms("k", 2.0, 0.5)))
    await queue.enqueue(job("c1", tenant="c", attempt=2))
    await queue.charge([UsageReport("r1", 1, 1, ended=False)])


async def _others_go_on(redis: Redis, spoilt: str) -> None:
    """Call every function that reads what others have written; each job but `spoilt` must be claimed."""
    queue, liveness = JobQueue(redis, KEYS, worker_id="w", limits=QueueLimits(jobs=99)), Liveness(redis, KEYS)
    await liveness.beat(STATE)
    await liveness.take_census("127.0.0.1:1")
    await queue.record_death("k", "sha256:other", "k2")
    await queue.enqueue(job("n1", tenant="n", deadline_ms=60_000))
    await queue.enqueue(job("b2", tenant="b"), Placement(key=KeyTerms("k", 2.0)))
    await queue.look_up([(name, 1) for name in WAITING for _ in range(LOOKS_PER_CHECK)])
    await queue.stop_waiting()
    await queue.charge([UsageReport("s1", 1, 0, ended=False), UsageReport("r1", 1, 2, ended=False)])
    found: set[str] = set()
    for _ in range(3):
        reports = [UsageReport("r1", 1, 3, ended=False)]
        found |= {taken.job_id for taken in (await queue.claim("sha256:0", ROOMY, reports)).jobs}
    assert found - {spoilt} == {*WAITING, "n1", "b2"} - {spoilt}
    await queue.enqueue(job("a1", tenant="a", attempt=2))
    for name in (*WAITING, "n1", "b2", "r1", "s1"):
        await queue.finish(name, 3)
    with suppress(QuarantinedError):
        await queue.enqueue(job("k3", tenant="k"))


async def _faults(redis: Redis, key: Any) -> list[Fault]:
    """Return changes of one key's values, one at a time."""
    name = key.decode().rpartition("}")[2].lstrip(":")
    kind, _, spoils = name.partition(":")
    changes: list[tuple[Any, ...]] = []
    match await redis.type(key):
        case b"string":
            changes = [("SET", key, text) for text in await _others_of(redis, await redis.get(key), kind in _PACKED)]
        case b"hash":
            for field, value in (await redis.hgetall(key)).items():
                others = await _others_of(redis, value, kind in _PACKED or (spoils, field) == _CHANGED_FULLY)
                changes += [("HSET", key, field, text) for text in others]
                changes.append(("HDEL", key, field))
            changes.append(("HSET", key, b"\xff", b"\xff"))
        case b"zset":
            added = (b"?", b"1" * 35 + b"a1")
            changes = [("ZADD", key, score, member) for score in ("-inf", "0", "inf") for member in added]
            if name in {"tenants", "uses", "idle"}:
                (first,) = await redis.zrange(key, 0, 0)
                changes += [("ZADD", key, score, first) for score in ("-inf", "inf")]
        case b"set":
            changes = [("SADD", key, b"\xff")]
        case b"stream":
            changes = [("XADD", key, "*", b"\xff", b"\xff")]
        case _:
            changes = [("RPUSH", key, b"\xff")]
    faults = [Fault(f"{name}: {change}", (change,), spoils) for change in changes]
    return faults if kind != "job" or spoils in _CHANGED_JOBS else []


async def _others_of(redis: Redis, value: Any, is_packed: bool) -> list[bytes]:
    made: Any = await redis.eval(_VARIANTS, 0, value) if is_packed else []
    return [*_TEXTS, *made]


async def test_a_value_that_no_script_has_written_stops_no_other_job(redis: Redis) -> None:
    await _fill(redis)
    keys = sorted(await redis.keys("*"))
    dumps: list[tuple[Any, Any]] = [(key, await redis.dump(key)) for key in keys]
    faults = [fault for key in keys for fault in await _faults(redis, key)]
    failed: list[str] = []
    for fault in faults:
        async with redis.pipeline(transaction=False) as pipe:
            pipe.flushdb()
            for key, dump in dumps:
                pipe.restore(key, 0, dump)
            for command in fault.commands:
                pipe.execute_command(*command)
            await pipe.execute()
        try:
            await _others_go_on(redis, fault.spoils)
        except Exception as error:
            failed.append(f"{fault.name}: {type(error).__name__} {str(error)[:200]}")
    assert not failed, f"{len(failed)} of {len(faults)}\n" + "\n".join(failed[:40])
    assert len(faults) > 150
