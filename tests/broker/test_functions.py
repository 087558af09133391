"""Calls of functions that share round trips: each gets its own answer or error, also after a restart and a timeout."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from loraplex.contracts.broker import keys
from loraplex.contracts.broker.functions import (
    CALLS_AT_ONCE,
    LIBRARY,
    BatchedFunction,
    Function,
    Library,
    load,
    shipped_functions,
)

ECHO = "if ARGV[1] == 'bad' then return redis.error_reply('ERR bad') end return ARGV[1]"


@pytest.fixture
def script(redis: Redis) -> BatchedFunction:
    return BatchedFunction(redis, function(redis, ECHO), "key")


def function(redis: Redis, text: str) -> Function:
    return library(text).function(redis, "f")


def library(text: str) -> Library:
    """Return a library of one function."""
    return Library(
        f"redis.register_function{{function_name = LIBRARY .. 'f', callback = function(KEYS, ARGV) {text} end}}"
    )


async def round_trips(redis: Redis) -> int:
    """Return how often the server has read from its clients."""
    return int((await redis.info("stats"))["total_reads_processed"])


async def test_calls_of_one_moment_share_round_trips_and_each_gets_its_answer(
    redis: Redis, script: BatchedFunction
) -> None:
    assert await script(["first"]) == b"first"
    before = await round_trips(redis)
    names = [f"call-{number}" for number in range(3 * CALLS_AT_ONCE)]
    assert await asyncio.gather(*(script([name]) for name in names)) == [name.encode() for name in names]
    assert await round_trips(redis) - before < 10


async def test_an_error_belongs_to_its_call_alone(script: BatchedFunction) -> None:
    answers = await asyncio.gather(script(["a"]), script(["bad"]), script(["b"]), return_exceptions=True)
    assert (answers[0], answers[2]) == (b"a", b"b")
    assert isinstance(answers[1], ResponseError)


async def test_a_server_that_has_forgotten_the_function_gets_it_again(redis: Redis, script: BatchedFunction) -> None:
    await script(["a"])
    await redis.function_flush()
    assert list(await asyncio.gather(script(["b"]), script(["c"]))) == [b"b", b"c"]


async def test_a_call_that_is_left_before_it_is_sent_is_not_sent(redis: Redis) -> None:
    script = BatchedFunction(redis, function(redis, "return redis.call('RPUSH', KEYS[1], ARGV[1])"), "list")
    leaving, staying = asyncio.create_task(script(["left"])), asyncio.create_task(script(["stayed"]))
    await asyncio.sleep(0)
    leaving.cancel()
    await staying
    assert await redis.lrange("list", 0, -1) == [b"stayed"]


async def test_who_waits_behind_a_call_that_times_out_fails_with_it(redis: Redis) -> None:
    class Hung(BatchedFunction):
        async def _run(self, calls: Any) -> list[Any]:
            await asyncio.sleep(0)
            raise RedisTimeoutError("no answer")

    script = Hung(redis, function(redis, ECHO), "key")
    answers = await asyncio.gather(*(script(["x"]) for _ in range(2 * CALLS_AT_ONCE)), return_exceptions=True)
    assert {type(answer) for answer in answers} == {RedisTimeoutError}


async def test_a_full_server_refuses_each_call_by_itself(redis: Redis) -> None:
    writing = BatchedFunction(redis, function(redis, "return redis.call('SET', KEYS[1], ARGV[1])"), "key")
    await writing(["loaded"])
    await redis.config_set("maxmemory", 1)
    try:
        answers = await asyncio.gather(writing(["a"]), writing(["b"]), return_exceptions=True)
        assert {type(answer) for answer in answers} == {OutOfMemoryError}
    finally:
        await redis.config_set("maxmemory", 0)


def test_all_keys_that_tenants_share_are_described() -> None:
    rows = re.findall(r"^lp:{MODEL/CELL}:(\w+) ", keys.__doc__ or "", re.MULTILINE)
    table = re.search(r"^local SHARED_KEYS = {(.*?)}", LIBRARY.text, re.MULTILINE | re.DOTALL)
    assert table is not None
    assert sorted(rows) == sorted(re.findall(r"'(\w+)'", table[1]))


async def test_all_functions_but_those_that_admit_requests_run_in_a_full_redis(redis: Redis) -> None:
    await load(redis, LIBRARY)
    found = dict(zip(*[iter((await redis.function_list(LIBRARY.name))[0])] * 2, strict=True))
    flags = {}
    for one in found[b"functions"]:
        function = dict(zip(one[::2], one[1::2], strict=True))
        flags[function[b"name"].decode().removeprefix(LIBRARY.name + "_")] = function[b"flags"]
    assert {name for name, of in flags.items() if not of} == {"admit", "enqueue", "ledger_reserve"}
    assert {name for name in flags if name.endswith("_when_full")} == {"enqueue_when_full", "ledger_reserve_when_full"}


async def test_versions_have_libraries_side_by_side(redis: Redis) -> None:
    await redis.function_flush()
    versions = [Library(shipped_functions()), Library(shipped_functions(HOLD_MS=1)), LIBRARY]
    for version in versions:
        await load(redis, version)
    found = [dict(zip(one[::2], one[1::2], strict=True)) for one in await redis.function_list()]
    assert {one[b"library_name"].decode() for one in found} == {versions[0].name, versions[1].name}
    assert versions[0].name == versions[2].name
