"""A script whose calls share round trips: those that come while others are under way go together in the next one.

A call by itself costs its process several times as much as one of many, and the connections of a burst fill the pool.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import TimeoutError as RedisTimeoutError

from broker.functions import Function, PreparedCall, is_missing

# Maximum calls, and bytes of their arguments, in one round trip: a call waits for those before it.
CALLS_AT_ONCE = 64
BYTES_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Calls that go together, in their order; `answers` is a list, in which an error may stand for an answer."""

    calls: Sequence[PreparedCall]
    answers: asyncio.Future[list[Any]]


class BatchedScript:
    """Calls a script. One round trip is under way at a time. `key` is that of calls that name no other."""

    def __init__(self, redis: Redis, script: Function, key: str = "") -> None:
        self._redis = redis
        self._script = script
        self._key = key
        self._waiting: deque[_Waiting] = deque()
        self._sending: asyncio.Task[None] | None = None

    def prepare(self, keys: Sequence[str], arguments: Sequence[Any]) -> PreparedCall:
        """Return a call of the script that another script's `after` sends."""
        return self._script.prepare(keys, arguments)

    async def __call__(self, arguments: Sequence[Any], key: str = "") -> Any:
        """Return the script's answer. Raises an error of broker.connection.REDIS_DOWN."""
        call = self._script.prepare((key or self._key,), arguments)
        if isinstance(self._redis, RedisCluster):  # its pipelines take no scripts
            return await call.send()
        (answer,) = await self._send_next(call)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def after(self, first: PreparedCall, arguments: Sequence[Any], *further_keys: str) -> tuple[Any, Any]:
        """Send another script's call and then one of this, in one round trip; return both answers, or errors.

        Not for a Redis Cluster.
        """
        own, other = await self._send_next(first, self._script.prepare((self._key, *further_keys), arguments))
        return own, other

    async def _send_next(self, *calls: PreparedCall) -> list[Any]:
        waiting = _Waiting(calls, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await waiting.answers

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch = self._next_batch()
                try:
                    answers = await self._run([call for one in batch for call in one.calls])
                except Exception as error:
                    if isinstance(error, RedisTimeoutError):  # the others have waited as long
                        batch += self._waiting
                        self._waiting.clear()
                    answers = [error for one in batch for _ in one.calls]
                at = 0
                for one in batch:
                    if not one.answers.done():
                        one.answers.set_result(answers[at : at + len(one.calls)])
                    at += len(one.calls)
        finally:
            self._sending = None
            for one in self._waiting:  # only where this task is cancelled
                one.answers.cancel()

    def _next_batch(self) -> list[_Waiting]:
        """Take the next calls, at least one; calls that nobody waits for any more are left out."""
        batch: list[_Waiting] = []
        size = 0
        while self._waiting and len(batch) < CALLS_AT_ONCE and size < BYTES_AT_ONCE:
            one = self._waiting.popleft()
            if not one.answers.cancelled():
                batch.append(one)
                size += sum(len(part) for call in one.calls for part in call.command if isinstance(part, bytes))
        return batch

    async def _run(self, calls: Sequence[PreparedCall]) -> list[Any]:
        """Return the calls' answers, some of which may be errors."""
        if len(calls) == 1:  # a pipeline costs this process a quarter more than a command
            return [await calls[0].send()]
        async with self._redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.execute_command(*call.command)
            answers = await pipe.execute(raise_on_error=False)
        for index, answer in enumerate(answers):
            if is_missing(answer):  # the server has lost its data
                answers[index] = await _alone(calls[index])
        return list(answers)


async def _alone(call: PreparedCall) -> Any:
    try:
        return await call.send()
    except Exception as error:
        return error
