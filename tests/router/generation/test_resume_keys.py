"""The keys that routers share over Redis: made once, rotated, lost and stored again."""

from __future__ import annotations

import asyncio
import logging

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from loraplex.contracts.broker.keys import RESUME_KEYS
from loraplex.contracts.broker.terms import RESUME_KEYS_LIMIT
from loraplex.router.generation.resume import Began, ResumeKeys, ResumePayload, ResumeTokens
from loraplex.runtime.rpc.errors import InvalidField, Mismatch, Unavailable
from tests.router.generation.test_resume import same

PAYLOAD = ResumePayload("r", "f", "tiny", "sha256:0", None, seed=1, max_tokens=7, began=Began(0, 0.0, 0.0, 0.0, 0.0))
NEW = "a key that an operator has put in front"


class Router:
    """A router, as far as its tokens are concerned."""

    def __init__(self, redis: Redis, *accepted: str, settle_s: float = 0.0) -> None:
        self.keys = ResumeKeys(accepted=accepted, redis=redis, settle_s=settle_s)
        self.tokens = ResumeTokens(self.keys)

    def sign(self) -> str:
        return self.tokens.sign(PAYLOAD, "acme")

    async def accepts(self, token: str) -> bool:
        try:
            return same(await self.tokens.verify(token, "acme"), PAYLOAD)
        except InvalidField:
            return False


async def started(redis: Redis, *accepted: str, settle_s: float = 0.0) -> Router:
    router = Router(redis, *accepted, settle_s=settle_s)
    await router.keys.look()
    return router


async def test_routers_without_a_key_accept_each_other_s_tokens(redis: Redis) -> None:
    routers = await asyncio.gather(*(started(redis) for _ in range(5)))
    assert await redis.llen(RESUME_KEYS) == 1
    later = await started(redis)
    for router in routers:
        assert await later.accepts(router.sign())
        assert await router.accepts(later.sign())
        assert not await router.accepts(later.tokens.sign(PAYLOAD, "globex"))


async def test_withdrawn_keys_end_with_the_router_that_knew_them(redis: Redis) -> None:
    first = await started(redis)
    old = first.sign()
    assert await first.keys.rotate() == 2
    await first.keys.look()
    new = first.sign()
    assert await first.keys.withdraw() == 1
    again = await started(redis)
    assert await again.accepts(new)
    assert not await again.accepts(old)
    assert await first.accepts(old)
    with pytest.raises(Mismatch, match="not in Redis"):
        await ResumeKeys("a key of 16 characters").withdraw()


async def test_a_rotated_key_signs_at_once_and_the_older_ones_stay(redis: Redis) -> None:
    first, second = await started(redis), await started(redis)
    old = first.sign()
    await redis.lpush(RESUME_KEYS, "short", NEW)
    await first.keys.look()
    assert first.keys.keys[0] == NEW
    new = first.sign()
    assert new != old
    assert await second.accepts(new), "an unknown token makes a router look"
    assert second.keys.keys[0] == NEW
    for router in (first, second, await started(redis)):
        assert await router.accepts(old)
        assert await router.accepts(new)
    for _ in range(RESUME_KEYS_LIMIT):
        await redis.flushall()
        await started(redis)
        await first.keys.look()
    assert await redis.llen(RESUME_KEYS) == RESUME_KEYS_LIMIT


async def test_a_given_key_goes_over_into_the_shared_one(redis: Redis) -> None:
    router = await started(redis, NEW)
    await redis.lpush(RESUME_KEYS, NEW)
    given = await started(redis)
    assert given.keys.keys[0] == NEW
    assert await router.accepts(given.sign())


async def test_lost_keys_are_stored_again(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    first, second = await started(redis), await started(redis)
    token = first.sign()
    await redis.flushall()
    await second.keys.look()
    assert await (await started(redis)).accepts(token)
    # Now a new router is the first after the loss.
    await redis.flushall()
    new = await started(redis)
    newer = new.sign()
    assert await first.accepts(newer)
    await second.keys.look()
    assert await new.accepts(token)
    assert {router.keys.keys[0] for router in (first, second, new)} == {new.keys.keys[0]}
    assert await redis.llen(RESUME_KEYS) == 2
    assert not any(key in caplog.text for router in (first, second, new) for key in router.keys.keys)


async def test_a_token_may_be_good_while_others_have_yet_to_store_their_keys(redis: Redis) -> None:
    token = (await started(redis)).sign()
    await redis.flushall()
    new = await started(redis, settle_s=3600.0)
    with pytest.raises(Unavailable) as later:
        await new.accepts(token)
    assert later.value.reason == "RESUME_KEYS_MISSING"
    assert not await (await started(redis)).accepts(token)


async def test_a_redis_that_is_away_or_full(redis: Redis) -> None:
    nowhere = Redis(unix_socket_path="/nowhere/valkey.sock", retry=Retry(NoBackoff(), 0))
    away = await started(nowhere, settle_s=3600.0)
    assert await away.accepts(away.sign())
    with pytest.raises(Unavailable):
        await away.accepts((await started(redis)).sign())
    await redis.flushall()
    await redis.config_set("maxmemory", 1)
    try:
        first, second = await started(redis), await started(redis)
    finally:
        await redis.config_set("maxmemory", 0)
    assert await second.accepts(first.sign())


async def test_forged_tokens_cost_redis_one_look(redis: Redis) -> None:
    router = await started(redis)
    await redis.config_resetstat()
    tokens = [ResumeTokens(ResumeKeys()).sign(PAYLOAD, "acme") for _ in range(100)]
    assert not any(await asyncio.gather(*map(router.accepts, tokens)))
    assert (await redis.info("commandstats"))["cmdstat_fcall"]["calls"] == 1
