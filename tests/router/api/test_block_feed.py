"""Subscribers are told of workers' blocks: the union of all caches, bounded, and only what they may see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from loraplex.engine_protocols import block_feed
from loraplex.engine_protocols.block_feed import BlockFeed, BlockSubscription
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.router.dispatch.links import WorkerLink
from loraplex.runtime.rpc.errors import CallError

BASE = "sha256:base"


def link(name: str) -> WorkerLink:
    return WorkerLink(name, f"{name}-1")


def block(key: int, tenant: str = "acme", parent: int | None = None) -> pb.CachedBlock:
    return pb.CachedBlock(key=key, parent=parent, tenant=tenant, token_ids=bytes(64))


def changes(*stored: pb.CachedBlock, removed: tuple[int, ...] = (), begins: bool = False) -> pb.BlockChanges:
    return pb.BlockChanges(base_digest=BASE, stored=stored, removed=removed, begins=begins, complete=True)


def everyone(tenant: str) -> bool:
    return True


async def subscribed(feed: BlockFeed, sees: Callable[[str], bool] = everyone, base: str = BASE) -> BlockSubscription:
    """Subscribe while the workers have nothing, as they say."""
    subscription = feed.subscribe(base, sees)
    for one in feed._workers:
        if not feed._workers[one].has_listed:
            feed.changed(one, changes(begins=True))
    assert await feed.blocks_of(subscription) == []
    return subscription


async def told(subscription: BlockSubscription) -> list[tuple[int, bool]]:
    async with asyncio.timeout(60):
        return [(event.block.key, event.stored) for event in await subscription.next_events()]


async def asked_to_follow(one: WorkerLink) -> bool:
    async with asyncio.timeout(60):
        message = await anext(one.messages())
    assert message.HasField("follow_blocks")
    return message.follow_blocks.on


async def test_a_block_is_there_while_any_worker_has_it() -> None:
    first, second = link("first"), link("second")
    feed = BlockFeed([first, second])
    subscription = await subscribed(feed)
    assert await asked_to_follow(first)
    feed.changed(first, changes(block(1), block(2, parent=1), begins=True))
    feed.changed(second, changes(block(1), block(3, parent=1), begins=True))
    assert await told(subscription) == [(1, True), (2, True), (3, True)]
    feed.changed(first, changes(removed=(1, 2)))
    assert await told(subscription) == [(2, False)]
    feed.down(second)
    assert sorted(await told(subscription)) == [(1, False), (3, False)], "its blocks, in the background"
    feed.unsubscribe(subscription)
    assert not await asked_to_follow(first)
    feed.changed(first, changes(block(4)))
    await subscribed(feed)  # nobody followed meanwhile


async def test_a_subscriber_waits_for_the_lists_of_all_workers() -> None:
    first, second = link("first"), link("second")
    feed = BlockFeed([first, second])
    subscription = feed.subscribe(BASE, everyone)
    waiting = asyncio.create_task(feed.blocks_of(subscription))
    feed.changed(first, changes(block(1), begins=True))
    feed.changed(second, changes(block(2), begins=True))
    async with asyncio.timeout(60):
        assert [one.key for one in await waiting] == [1, 2]
    feed.changed(second, changes(block(3)))
    assert await told(subscription) == [(3, True)]


async def test_a_worker_that_tells_of_all_again_changes_only_what_is_different() -> None:
    worker = link("worker")
    feed = BlockFeed([worker])
    subscription = await subscribed(feed)
    feed.changed(worker, changes(block(1), block(2), begins=True))
    await told(subscription)
    part = changes(block(1), begins=True)
    part.complete = False
    feed.changed(worker, part)
    feed.changed(worker, changes(block(3)))
    assert await told(subscription) == [(3, True), (2, False)]


async def test_a_subscriber_sees_its_tenants_and_its_model() -> None:
    worker = link("worker")
    feed = BlockFeed([worker])
    acme = await subscribed(feed, lambda tenant: tenant == "acme")
    feed.changed(worker, changes(block(1), block(2, "globex"), begins=True))
    assert await told(acme) == [(1, True)]
    later = feed.subscribe(BASE, lambda tenant: tenant == "globex")
    assert [one.key for one in await feed.blocks_of(later)] == [2]
    await subscribed(feed, base="sha256:other")


async def test_one_who_reads_too_slowly_is_cut_off_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_feed, "MOST_WAITING", 3)
    worker = link("worker")
    feed = BlockFeed([worker])
    slow, quick = await subscribed(feed), await subscribed(feed)
    for key in range(0, 6, 2):
        feed.changed(worker, changes(block(key), block(key + 1)))
        assert await told(quick) == [(key, True), (key + 1, True)]
    with pytest.raises(CallError, match="more than 3 events waited") as caught:
        await told(slow)
    assert caught.value.reason == "SUBSCRIBER_TOO_SLOW"


@pytest.mark.parametrize("why", ["SUBSCRIBER_TOO_SLOW", "TOO_MANY_BLOCKS", "ROUTER_DRAINING"])
async def test_all_subscriptions_end_with_one_reason(why: str) -> None:
    worker = link("worker")
    feed = BlockFeed([worker], most_blocks=2)
    subscriptions = [await subscribed(feed) for _ in range(2)]
    match why:
        case "SUBSCRIBER_TOO_SLOW":
            feed.changed(worker, pb.BlockChanges(lost=True))
        case "TOO_MANY_BLOCKS":
            feed.changed(worker, changes(*(block(key) for key in range(3))))
        case "ROUTER_DRAINING":
            feed.stop()
            with pytest.raises(CallError):
                feed.subscribe(BASE, everyone)
    for subscription in subscriptions:
        with pytest.raises(CallError) as caught:
            await told(subscription)
        assert caught.value.reason == why
