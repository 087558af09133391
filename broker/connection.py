"""Connecting to Redis or Valkey, and saying clearly when that does not work."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

# What a lost or slow server looks like; anything else is a fault of ours.
REDIS_DOWN = (RedisConnectionError, RedisTimeoutError, OSError)


class RedisUnreachableError(Exception):
    """The server does not answer, or is not one that can be used; one line that says what to do."""


async def connect(url: str) -> Redis:
    """A client (bytes in, bytes out) whose server answered. Raises RedisUnreachableError."""
    try:
        # A blocked BLPOP waits longer than any answer may: the read timeout is above it.
        client: Redis = Redis.from_url(
            url,
            socket_timeout=5.0,
            socket_connect_timeout=2.0,
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), retries=3),
            retry_on_error=[RedisConnectionError],
        )
    except ValueError as error:
        raise RedisUnreachableError(f"--redis-url {url}: {error}") from error
    try:
        info = await client.info("server")
    except (RedisError, OSError) as error:
        await client.aclose()
        raise RedisUnreachableError(f"--redis-url {url}: no answer ({error}); is the server up?") from error
    version = str(info["redis_version"])
    if int(version.split(".", maxsplit=1)[0]) < 7:
        await client.aclose()
        raise RedisUnreachableError(f"--redis-url {url}: version {version} is too old; 7.0 or newer is needed")
    return client
