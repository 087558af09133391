"""Test commands of operators to workers as bytes, and the pins that workers find when they start."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.commands import (
    DRAIN,
    Command,
    CommandQueue,
    PinnedAdapters,
    Verb,
    decode_command,
    encode_command,
)
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import AdapterRef, AdapterRequest

KEYS = Keys("model", "commands")


def ref(adapter: str, digest: str) -> AdapterRef:
    return AdapterRef(f"tenants/acme/adapters/{adapter}/revisions/{digest}", digest, rank=8, weight_bytes=1 << 40)


REQUEST = AdapterRequest(ref("a", "sha256-1"), "acme")


@pytest.mark.parametrize("verb", [Verb.WARM, Verb.PIN, Verb.UNPIN])
def test_a_command_about_an_adapter_comes_back_whole(verb: Verb) -> None:
    assert decode_command(encode_command(Command(verb, REQUEST))) == Command(verb, REQUEST)


def test_a_drain_is_one_word_as_in_earlier_versions() -> None:
    assert encode_command(DRAIN) == b"drain"
    assert decode_command(b"drain") == DRAIN


@pytest.mark.parametrize("data", [b"", b"dance", b"pin", b"warm ", b"pin \xff", b"\xff\xfe pin", b"PIN \n\x00"])
def test_another_version_s_commands_are_nothing(data: bytes) -> None:
    assert decode_command(data) is None


async def test_commands_come_in_their_order(redis: Redis) -> None:
    queue = CommandQueue(redis, KEYS)
    sent = [Command(Verb.PIN, REQUEST), Command(Verb.UNPIN, REQUEST), DRAIN]
    for command in sent:
        await queue.send("incarnation", command)
    assert [await queue.next("incarnation", 30) for _ in sent] == sent


async def test_to_unpin_an_adapter_is_to_unpin_its_revisions_and_no_others(redis: Redis) -> None:
    pins = PinnedAdapters(redis, KEYS)
    for adapter, digest in (("a", "sha256-1"), ("a", "sha256-2"), ("ab", "sha256-3"), ("a", "sha256-1")):
        await pins.pin(AdapterRequest(ref(adapter, digest), "acme"))
    await redis.hset(KEYS.pins, "another version's", b"\xff")
    assert {one.adapter.digest for one in await pins.list()} == {"sha256-1", "sha256-2", "sha256-3"}
    await pins.unpin(ref("a", "sha256-9"))
    assert await pins.list() == [AdapterRequest(ref("ab", "sha256-3"), "acme")]
    await pins.unpin(ref("other", "sha256-3"))
    assert await pins.list() == []


async def test_a_purge_leaves_pins_of_the_same_bytes_to_other_tenants(redis: Redis) -> None:
    pins = PinnedAdapters(redis, KEYS)
    shared = AdapterRef("tenants/shared/adapters/a/revisions/sha256-1", "sha256-1", 8, 1)
    for tenant in ("acme", "globex", "initech"):
        await pins.pin(AdapterRequest(shared, tenant))
    assert await pins.forget_tenant("globex") == 1
    assert {pin.tenant for pin in await pins.list()} == {"acme", "initech"}
    assert [await pins.forget_tenant(tenant) for tenant in ("initech", "acme", "acme")] == [1, 1, 0]
    assert await pins.list() == []
    for tenant in ("acme", "globex"):
        await pins.pin(AdapterRequest(shared, tenant))
    await pins.unpin(shared)
    assert await pins.list() == []
