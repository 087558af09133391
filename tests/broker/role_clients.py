"""Clients as the users that routers and workers have in a cluster with credentials (broker/acl.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from loraplex.contracts.broker import acl
from loraplex.contracts.broker.connection import connect
from tests.broker.clocked_queue import CLOCK

PASSWORD = "of a test"


async def make_users(redis: Redis, model: str, cell: str, *further: str) -> None:
    """Make the users of all roles, with `further` rules; what was refused before is forgotten."""
    for user in acl.ROLES:
        await run(redis, "ACL", "SETUSER", user, "reset", *acl.rules(user, [model], [cell], [PASSWORD]), *further)
    await run(redis, "ACL", "LOG", "RESET")


async def refused(redis: Redis) -> set[tuple[str, str]]:
    """Return the commands and keys that users were refused."""
    return {(entry["username"], entry["object"]) for entry in await run(redis, "ACL", "LOG")}


async def run(redis: Redis, *command: str) -> Any:
    """Run a command for which the library has no method that fits."""
    return await redis.execute_command(" ".join(command[:2]), *command[2:])  # type: ignore[no-untyped-call]  # theirs


@asynccontextmanager
async def role_clients(redis: Redis, url: str) -> AsyncIterator[tuple[Redis, Redis]]:
    """A router's and a worker's client; nothing that they do may be refused. Functions may read the tests' clock."""
    await make_users(redis, "tiny", "main", f"%R~{CLOCK}")
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(await connect(url.replace("unix://", f"unix://{user}:{PASSWORD}@")))
            for user in ("router", "worker")
        ]
        yield clients[0], clients[1]
        assert await refused(redis) == set()
