"""Connecting to Redis or Valkey, and saying clearly when that does not work."""

from __future__ import annotations

import re

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

# What a server looks like that is lost, slow, or refuses to work for now (a replica, a full disk).
REDIS_DOWN = (RedisError, OSError)

CONNECTIONS = 16


class RedisUnreachableError(Exception):
    """The server does not answer, or is not one that can be used; one line that says what to do."""


async def connect(url: str) -> Redis:
    """A client (bytes in, bytes out) whose server answered. Raises RedisUnreachableError."""
    try:
        # Callers wait for a connection rather than open hundreds at once. The read timeout is above any BLPOP's wait.
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=5.0,
            socket_timeout=5.0,
            socket_connect_timeout=2.0,
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), retries=3),
            retry_on_error=[RedisConnectionError],
        )
        client = Redis.from_pool(pool)
    except ValueError as error:
        raise RedisUnreachableError(f"--redis-url {_shown(url)}: {error}") from error
    try:
        info = await client.info("server")
    except (RedisError, OSError) as error:
        await client.aclose()
        raise RedisUnreachableError(f"--redis-url {_shown(url)}: no answer ({error}); is the server up?") from error
    version = str(info["redis_version"])
    if int(version.split(".", maxsplit=1)[0]) < 7:
        await client.aclose()
        raise RedisUnreachableError(f"--redis-url {_shown(url)}: version {version} is too old; 7.0 or newer is needed")
    return client


def _shown(url: str) -> str:
    """The URL without its password, which must not reach a terminal or a log."""
    return re.sub(r"//([^:/@]*):[^@]*@", r"//\1:***@", url)
