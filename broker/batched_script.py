"""A script whose calls share round trips: those that come while others are under way go together in the next one.

A call by itself costs its process several times as much as one of many, and the connections of a burst fill the pool.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import TimeoutError as RedisTimeoutError

from broker.functions import Function, is_missing

# Maximum calls, and bytes of their arguments, in one round trip: a call waits for those before it.
CALLS_AT_ONCE = 64
BYTES_AT_ONCE = 1 << 20

Call = tuple[str, Sequence[Any], "asyncio.Future[Any]"]


class BatchedScript:
    """Calls a script. One round trip is under way at a time. `key` is that of calls that name no other."""

    def __init__(self, redis: Redis, script: Function, key: str = "") -> None:
        self._redis = redis
        self._script = script
        self._key = key
        self._waiting: deque[Call] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def __call__(self, arguments: Sequence[Any], key: str = "") -> Any:
        """Return the script's answer. Raises an error of broker.connection.REDIS_DOWN."""
        key = key or self._key
        if isinstance(self._redis, RedisCluster):  # its pipelines take no scripts
            return await self._script(key, arguments)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, arguments, answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await answer

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch = self._next_batch()
                try:
                    answers = await self._run([(key, arguments) for key, arguments, _ in batch])
                except Exception as error:
                    if isinstance(error, RedisTimeoutError):  # the others have waited as long
                        batch += self._waiting
                        self._waiting.clear()
                    answers = [error] * len(batch)
                for (_, _, answer), value in zip(batch, answers, strict=True):
                    _settle(answer, value)
        finally:
            self._sending = None
            for _, _, answer in self._waiting:  # only where this task is cancelled
                answer.cancel()

    def _next_batch(self) -> list[Call]:
        """Take the next calls, at least one; calls that nobody waits for any more are left out."""
        batch: list[Call] = []
        size = 0
        while self._waiting and len(batch) < CALLS_AT_ONCE and size < BYTES_AT_ONCE:
            key, arguments, answer = self._waiting.popleft()
            if not answer.cancelled():
                batch.append((key, arguments, answer))
                size += sum(len(part) for part in arguments if isinstance(part, bytes))
        return batch

    async def _run(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """Return the calls' answers, some of which may be errors."""
        if len(calls) == 1:  # a pipeline costs this process a quarter more than a command
            return [await self._script(*calls[0])]
        async with self._redis.pipeline(transaction=False) as pipe:
            for key, arguments in calls:
                pipe.execute_command(*self._script.command(key, arguments))
            answers = await pipe.execute(raise_on_error=False)
        for index, answer in enumerate(answers):
            if is_missing(answer):  # the server has lost its data
                answers[index] = await self._alone(*calls[index])
        return list(answers)

    async def _alone(self, key: str, arguments: Sequence[Any]) -> Any:
        try:
            return await self._script(key, arguments)
        except Exception as error:
            return error


def _settle(answer: asyncio.Future[Any], value: Any) -> None:
    if answer.done():
        return
    if isinstance(value, Exception):
        answer.set_exception(value)
    else:
        answer.set_result(value)
