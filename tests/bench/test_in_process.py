"""The Redis in this process answers as a real server does: the same commands, drawn by chance, at both."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from bench.in_process.redis import Server

SEEDS, COMMANDS = 4, 400
NAMES = ("a", "b", "c:1", "c:22", "é")
NUMBERS = (-2, -1, 0, 1, 2, 7)
SCORES = ("-inf", "+inf", -1, 0, 0.1, 2.5, 1e15, "(0", "(2.5")
# By the beginning of a key: kinds that commands expect; the last one mixes them.
KINDS = "shlzkx"
UNORDERED = {"HKEYS", "SMEMBERS", "KEYS"}
PACK = """#!lua name=packing
redis.register_function{function_name = 'pack_again', callback = function(keys, arguments)
  return cmsgpack.pack(unpack({cmsgpack.unpack(arguments[1])}))
end}
redis.register_function{function_name = 'answers', callback = function(keys, arguments)
  redis.call('SET', keys[1], 1 / 4)
  redis.call('HSET', keys[2], 'count', 2 ^ 40)
  return {1.9, -1.9, 'text', true, {redis.call('GET', keys[1]), redis.call('HGET', keys[2], 'count')},
    redis.pcall('LPUSH', keys[1], 1).err, redis.call('TYPE', keys[2]).ok, false, 3, nil, 4}
end}
"""


def draw(chance: random.Random) -> tuple[Any, ...]:
    """Draw a command."""
    kind = chance.choice(KINDS)
    key, name, other = f"{chance.choice((kind, kind, 'x'))}{chance.randint(0, 1)}", *chance.choices(NAMES, k=2)
    number, last, score = chance.choice(NUMBERS), chance.choice(NUMBERS), chance.choice(SCORES[:7])
    own: dict[str, tuple[tuple[Any, ...], ...]] = {
        "s": (
            ("SET", key, name),
            ("SET", key, number, "NX"),
            ("SET", key, 5, "PX", 90_000),
            ("GET", key),
            ("INCR", key),
        ),
        "h": (
            *(("HSET", key, name, number), ("HSET", key, name, 1, other, 2), ("HSETNX", key, name, other)),
            *(("HDEL", key, name, other), ("HGET", key, name), ("HMGET", key, name, other), ("HKEYS", key)),
            *(("HLEN", key), ("HEXISTS", key, name)),
        ),
        "l": (
            *(("RPUSH", key, name, other), ("LPUSH", key, name, other), ("LPOP", key), ("LTRIM", key, number, last)),
            *(("LRANGE", key, number, last), ("LINDEX", key, number), ("LREM", key, 0, name), ("LLEN", key)),
        ),
        "z": (
            *(("ZADD", key, score, name), ("ZADD", key, "NX", score, name, 3, other), ("ZREM", key, name, other)),
            *(("ZCARD", key), ("ZSCORE", key, name), ("ZMSCORE", key, name, other)),
            *(("ZRANGE", key, number, last), ("ZRANGE", key, number, last, "WITHSCORES")),
            *(("ZREVRANGE", key, number, last), ("ZREVRANGE", key, number, last, "WITHSCORES")),
            ("ZRANGEBYSCORE", key, chance.choice(SCORES), chance.choice(SCORES)),
            ("ZRANGEBYSCORE", key, "-inf", chance.choice(SCORES), "LIMIT", 0, 2),
            ("ZREMRANGEBYSCORE", key, "-inf", chance.choice(SCORES)),
            *(("DEL", "z9"), ("ZADD", "z9", *(part for one in NAMES for part in (0, one)))),
            ("ZLEXCOUNT", "z9", "-", f"({name}"),
        ),
        "k": (("SADD", key, name, other), ("SREM", key, name), ("SMEMBERS", key), ("SCARD", key)),
        "x": (
            *(("EXISTS", key, "z0", "h0"), ("TYPE", key), ("DEL", key), ("KEYS", "*")),
            *(("RENAME", key, f"{key}9"), ("PEXPIRE", key, 90_000)),
        ),
    }
    return chance.choice(own[kind])


async def answer_of(redis: Redis, command: tuple[Any, ...]) -> Any:
    """Return a real server's answer, as it comes."""
    try:
        connection = await redis.connection_pool.get_connection()  # type: ignore[no-untyped-call]  # theirs
        try:
            await connection.send_command(*command)
            return await connection.read_response()
        finally:
            await redis.connection_pool.release(connection)
    except ResponseError as error:
        return error


def plain(command: tuple[Any, ...], answer: Any) -> Any:
    """Return an answer without what differs by protocol and library: sets' order, numbers' kinds, errors' texts."""
    if isinstance(answer, ResponseError):
        return "WRONGTYPE" if "WRONGTYPE" in str(answer) else "error"
    if isinstance(answer, list) and answer and isinstance(answer[0], list):  # members with their scores
        answer = [one for pair in answer for one in pair]
    if isinstance(answer, list):
        found = [plain((), one) for one in answer]
        return sorted(found, key=str) if command and command[0] in UNORDERED else found
    try:
        return float(answer)
    except (TypeError, ValueError):
        return answer


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_commands_are_answered_alike(redis: Redis, seed: int) -> None:
    chance, server = random.Random(seed), Server(lambda: 1_700_000_000_000)
    print(f"seed {seed}")
    await redis.flushall()
    for _ in range(COMMANDS):
        command = draw(chance)
        theirs, ours = await answer_of(redis, command), server.answer(command)
        assert plain(command, theirs) == plain(command, ours), command


async def test_functions_get_and_give_the_same(redis: Redis) -> None:
    server = Server(lambda: 1_700_000_000_000)
    server.execute("FUNCTION LOAD", PACK)
    await redis.execute_command("FUNCTION", "LOAD", "REPLACE", PACK)  # type: ignore[no-untyped-call]  # theirs
    numbers = (0, 1, -1, -33, 127, 128, 255, 256, 65_535, 65_536, 2**32, 2**53, 0.1, -2.5, 1e300)
    texts = ("", "a", "b" * 31, "c" * 32, "d" * 255, "e" * 256, "f" * 70_000, "é")
    value = [*numbers, *texts, True, False, [1, [2, "x"]], list(range(20)), {"only": {"one": 1}}]
    packed = msgspec.msgpack.encode(value)
    for command in (("FCALL", "pack_again", 0, packed), ("FCALL", "answers", 2, "s", "h")):
        theirs, ours = await answer_of(redis, command), server.answer(command)
        if command[1] == "pack_again":
            theirs, ours = msgspec.msgpack.decode(theirs), msgspec.msgpack.decode(ours)
            assert ours == value
        assert theirs == ours
