"""Test keys of another type that all cells share: a router that finds one sets it aside and goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis

from broker.keys import LEDGER_TENANTS, RESUME_KEYS
from broker.ledger import Ledger
from broker.resume_keys import StoredResumeKeys
from tests.broker.role_clients import role_clients


async def _resume_keys(redis: Redis) -> list[str]:
    return await StoredResumeKeys(redis).merge("made", [])


async def _tenants(redis: Redis) -> list[str]:
    ledger = Ledger(redis, reports=True)
    found = await ledger.some_tenants(9)
    await ledger.add_tenant("acme")
    return found + await ledger.some_tenants(9)


@pytest.mark.parametrize(
    ("key", "use", "found"), [(RESUME_KEYS, _resume_keys, ["made"]), (LEDGER_TENANTS, _tenants, ["acme"])]
)
async def test_a_key_of_another_type_is_set_aside(
    redis: Redis, valkey_url: str, key: str, use: Callable[[Redis], Awaitable[list[str]]], found: list[str]
) -> None:
    await redis.hset(key, "x", "y")
    async with role_clients(redis, valkey_url) as (of_router, _):
        assert await use(of_router) == found
    assert await redis.hgetall(f"{key}:aside") == {b"x": b"y"}
    assert await redis.pttl(f"{key}:aside") > 0


async def test_a_tenant_s_name_that_is_no_text_ends_no_router(redis: Redis) -> None:
    await redis.sadd(LEDGER_TENANTS, b"\xff")
    assert await Ledger(redis, reports=True).some_tenants(9) == ["\ufffd"]
