"""The Lua functions of the queue and the ledger, in broker/lua: their library in Redis, and calls of them.

Redis keeps and replicates functions like data. A server without the library, which has lost its data, is given it
again. Whoever may load functions (FUNCTION LOAD) can change what everybody else's calls do; so workers' users may not,
and wait until a router has loaded the library (broker/acl.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from hashlib import sha256
from importlib.resources import files
from typing import Any
from weakref import WeakKeyDictionary

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import NoPermissionError, OutOfMemoryError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from loraplex.contracts.broker import terms

# The files of broker/lua, in the order in which they are joined: a function may use the tables of those before.
_FILES = (
    *("base", "tenants", "workers", "suspects", "charges", "jobs"),
    *("demand", "enqueue", "claim", "upkeep", "ledger"),
)
# Characters of the hash in a library's name.
_HASH_CHARACTERS = 16
# Interval in seconds between tries of a client whose user was refused to load functions: the text has tens of
# kilobytes, and the try after an operator has mended the user must come without a restart.
REFUSED_S = 10.0
# Maximum calls, and bytes of their arguments, in one round trip: a call waits for those before it.
CALLS_AT_ONCE = 64
BYTES_AT_ONCE = 1 << 20
_NOT_PERMITTED = "this user may not load them; a router of this version does, or its `loraplex redis acl --apply`"
# The words of a call: FCALL, the function, the number of keys, the key, and arguments.
Command = tuple[Any, ...]
# Time on the monotonic clock at which a client's user was last refused to load functions.
_refused_at: WeakKeyDictionary[Redis, float] = WeakKeyDictionary()


class Library:
    """A library of functions. Its name, with which their names begin, has a hash of the text.

    So the versions of a rolling upgrade have libraries of their own side by side.
    """

    def __init__(self, functions: str) -> None:
        self.name = "loraplex_" + sha256(functions.encode()).hexdigest()[:_HASH_CHARACTERS]
        self.text = f"#!lua name={self.name}\nlocal LIBRARY = '{self.name}_'\n{functions}"

    def function(self, redis: Redis, name: str) -> Function:
        """Return the function of a name; NAME_when_full is for a Redis without memory."""
        return Function(redis, self, name)


def shipped_functions(**replaced: int) -> str:
    """Return the text of broker/lua, after the whole numbers of broker/terms.py; tests have some replaced."""
    numbers = {name: value for name, value in vars(terms).items() if isinstance(value, int) and name.isupper()}
    numbers.update(replaced)
    texts = [
        files("loraplex.contracts.broker").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8") for name in _FILES
    ]
    return "".join([f"local {', '.join(numbers)} = {', '.join(map(str, numbers.values()))}\n", *texts])


class FunctionsMissingError(RedisError):
    """Redis has no library of this version, and cannot be given it by this process; the message says why."""

    def __init__(self, why: str) -> None:
        super().__init__(f"Redis has no functions of this version: {why}")


class Function:
    """A function in Redis."""

    def __init__(self, redis: Redis, library: Library, name: str) -> None:
        self._redis = redis
        self._library = library
        self._name = f"{library.name}_{name}"

    def command(self, key: str, arguments: Sequence[Any]) -> Command:
        """Return a call of the function, for pipelines."""
        return "FCALL", self._name, 1, key, *arguments

    async def send(self, command: Command) -> Any:
        """Send a call by itself; return its answer. Raises an error of broker.connection.REDIS_DOWN."""
        try:
            return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]  # theirs
        except ResponseError as error:
            if not is_missing(error):
                raise
        await load(self._redis, self._library, command[3])
        return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]  # theirs

    async def __call__(self, key: str, arguments: Sequence[Any]) -> Any:
        """Call the function. Raises an error of broker.connection.REDIS_DOWN."""
        return await self.send(self.command(key, arguments))


async def load(redis: Redis, library: Library, key: str = "") -> None:
    """Load a library, which another process may have loaded meanwhile. Raises an error of REDIS_DOWN.

    In a cluster it is loaded at the node that has `key`, which may have joined since; without one, at all nodes.
    """
    refused_at = _refused_at.get(redis)
    if refused_at is not None and time.monotonic() - refused_at < REFUSED_S:
        raise FunctionsMissingError(_NOT_PERMITTED)
    try:
        node: dict[str, Any] = (
            {"target_nodes": redis.get_node_from_key(key)} if key and isinstance(redis, RedisCluster) else {}
        )
        await redis.execute_command("FUNCTION LOAD", library.text, **node)  # type: ignore[no-untyped-call]  # theirs
    except NoPermissionError as error:
        _refused_at[redis] = time.monotonic()
        raise FunctionsMissingError(_NOT_PERMITTED) from error
    except OutOfMemoryError as error:
        why = "it has no memory for them; raise its maxmemory, or empty it: routers put waiting jobs back"
        raise FunctionsMissingError(why) from error
    except ResponseError as error:
        if "already exists" not in str(error):
            raise


def is_missing(error: object) -> bool:
    """Tell whether an error of a call says that the server has no such function."""
    return isinstance(error, ResponseError) and "Function not found" in str(error)


class BatchedFunction:
    """A function whose calls share round trips: those that come while others are under way go together in the next one.

    A call by itself costs its process several times as much as one of many, and the connections of a burst fill the
    pool. `key` is that of calls that name no other.
    """

    def __init__(self, redis: Redis, function: Function, key: str = "") -> None:
        self._redis = redis
        self._function = function
        self._key = key
        # Calls, each with its answer or error.
        self._waiting: deque[tuple[Command, asyncio.Future[Any]]] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def __call__(self, arguments: Sequence[Any], key: str = "") -> Any:
        """Return the function's answer. Raises an error of broker.connection.REDIS_DOWN."""
        call = self._function.command(key or self._key, arguments)
        if isinstance(self._redis, RedisCluster):  # its pipelines take no functions
            return await self._function.send(call)
        waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, waiting))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        answer = await waiting
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch = self._next_batch()
                try:
                    answers = await self._run([call for call, _ in batch])
                except Exception as error:
                    if isinstance(error, RedisTimeoutError):  # the others have waited as long
                        batch += self._waiting
                        self._waiting.clear()
                    answers = [error] * len(batch)
                for (_, waiting), answer in zip(batch, answers, strict=True):
                    if not waiting.done():
                        waiting.set_result(answer)
        finally:
            self._sending = None
            for _, waiting in self._waiting:  # only where this task is cancelled
                waiting.cancel()

    def _next_batch(self) -> list[tuple[Command, asyncio.Future[Any]]]:
        """Take the next calls, at least one; calls that nobody waits for any more are left out."""
        batch: list[tuple[Command, asyncio.Future[Any]]] = []
        size = 0
        while self._waiting and len(batch) < CALLS_AT_ONCE and size < BYTES_AT_ONCE:
            call, waiting = self._waiting.popleft()
            if not waiting.cancelled():
                batch.append((call, waiting))
                size += sum(len(part) for part in call if isinstance(part, bytes))
        return batch

    async def _run(self, calls: Sequence[Command]) -> list[Any]:
        """Return the calls' answers, some of which may be errors."""
        if len(calls) == 1:  # a pipeline costs this process a quarter more than a command
            return [await self._function.send(calls[0])]
        async with self._redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.execute_command(*call)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
        for index, answer in enumerate(answers):
            if is_missing(answer):  # the server has lost its data
                try:
                    answers[index] = await self._function.send(calls[index])
                except Exception as error:
                    answers[index] = error
        return answers


LIBRARY = Library(shipped_functions())
