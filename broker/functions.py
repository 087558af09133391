"""Calls of the library's functions in Redis. A server without the library, which has lost its data, is given it again.

Redis keeps and replicates functions like data. Whoever may load functions (FUNCTION LOAD) can change what everybody
else's calls do; so workers' users may not, and wait until a router has loaded the library (broker/acl.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, OutOfMemoryError, RedisError, ResponseError

from broker.lua_library import Library

# Interval in seconds between tries of a client whose user was refused to load functions: the text has tens of
# kilobytes, and the try after an operator has mended the user must come without a restart.
REFUSED_S = 10.0
_NOT_PERMITTED = "this user may not load them; a router of this version does, or its `loraplex redis acl --apply`"
# Time on the monotonic clock at which a client's user was last refused to load functions.
_refused_at: WeakKeyDictionary[Redis, float] = WeakKeyDictionary()


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

    def command(self, key: str, arguments: Sequence[Any]) -> Sequence[Any]:
        """Return the command of a call, for pipelines."""
        return ("FCALL", self._name, 1, key, *arguments)

    async def __call__(self, key: str, arguments: Sequence[Any]) -> Any:
        """Call the function. Raises an error of broker.connection.REDIS_DOWN."""
        command = self.command(key, arguments)
        try:
            return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]  # theirs
        except ResponseError as error:
            if not is_missing(error):
                raise
        await load(self._redis, self._library)
        return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]  # theirs


async def load(redis: Redis, library: Library) -> None:
    """Load a library, which another process may have loaded meanwhile. Raises an error of REDIS_DOWN."""
    refused_at = _refused_at.get(redis)
    if refused_at is not None and time.monotonic() - refused_at < REFUSED_S:
        raise FunctionsMissingError(_NOT_PERMITTED)
    try:
        await redis.function_load(library.text)
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
