"""Calls of the library's functions in Redis. A server without the library, which has lost its data, is given it again.

Redis keeps and replicates functions like data. Whoever may load functions (FUNCTION LOAD) can change what everybody
else's calls do; so workers' users may not, and wait until a router has loaded the library (broker/acl.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from redis.asyncio import Redis, RedisCluster
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


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call of a function, which may be sent with others; `command` is for pipelines."""

    redis: Redis
    library: Library
    command: Sequence[Any]

    async def send(self) -> Any:
        """Send the call by itself; return its answer. Raises an error of broker.connection.REDIS_DOWN."""
        try:
            return await self.redis.execute_command(*self.command)  # type: ignore[no-untyped-call]  # theirs
        except ResponseError as error:
            if not is_missing(error):
                raise
        await load(self.redis, self.library, self.command[3])
        return await self.redis.execute_command(*self.command)  # type: ignore[no-untyped-call]  # theirs


class Function:
    """A function in Redis."""

    def __init__(self, redis: Redis, library: Library, name: str) -> None:
        self._redis = redis
        self._library = library
        self._name = f"{library.name}_{name}"

    def prepare(self, keys: Sequence[str], arguments: Sequence[Any]) -> PreparedCall:
        """Return a call of the function."""
        return PreparedCall(self._redis, self._library, ("FCALL", self._name, len(keys), *keys, *arguments))

    async def __call__(self, key: str, arguments: Sequence[Any]) -> Any:
        """Call the function. Raises an error of broker.connection.REDIS_DOWN."""
        return await self.prepare((key,), arguments).send()


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
