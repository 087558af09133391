"""The blocks of all workers' prefix caches, as subscribers of a router follow them.

    workers ══relay: BlockChanges══▶ BlockFeed ──events──▶ BlockSubscription (bounded) ──▶ SubscribeKvEvents

Workers tell of their caches only while somebody subscribes. To a subscriber the workers of a base model are one cache:
a block is stored when the first worker has it, and removed when the last one has lost it. Subscribers see the blocks of
the tenants that they may see.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from sys import intern
from typing import NamedTuple

from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.router.dispatch.links import WorkerLink
from loraplex.runtime.rpc.errors import CallError, DataLoss, Exhausted, Unavailable

# Maximum number of blocks that a router follows, of all workers together: with some 350 bytes for each.
MOST_BLOCKS = 1_000_000
# Maximum number of events that wait for a subscriber. One that reads slower is cut off.
MOST_WAITING = 262_144
# Maximum number of events that a subscriber gets at once.
MOST_AT_ONCE = 1_024
# Timeout in seconds for the workers to tell of all their blocks; later ones come as events.
LISTING_S = 2.0
# Bytes of a token id; a worker that sends others has no such block.
_ID_BYTES = 4

# Number of blocks of a worker that are removed before other work of the event loop has its turn: some milliseconds.
_REMOVED_AT_ONCE = 1_024


@dataclass(slots=True)
class FollowedBlock:
    """A block of a tenant, with the names of relay.v1.CachedBlock; `copies` workers have it."""

    key: int
    parent: int | None
    tenant: str
    adapter: str
    token_ids: bytes
    copies: int = 0


class BlockEvent(NamedTuple):
    """A block that the workers have got, or lost."""

    block: FollowedBlock
    stored: bool


class BlockSubscription:
    """The events of one subscriber, of one base model."""

    def __init__(self, base_digest: str, sees: Callable[[str], bool]) -> None:
        self.base_digest = base_digest
        self.sees = sees
        self._events: deque[BlockEvent] = deque()
        self._error: CallError | None = None
        self._due = asyncio.Event()
        self._begun = False

    def begin(self) -> None:
        """Keep events from now on."""
        self._begun = True

    def select(self, blocks: Iterable[FollowedBlock]) -> list[FollowedBlock]:
        """Return the blocks that the subscriber may see; for a thread, where there are many."""
        return [block for block in blocks if self.sees(block.tenant)]

    def add(self, event: BlockEvent) -> None:
        """Keep an event for the subscriber, if it may see it."""
        if not self._begun or self._error is not None or not self.sees(event.block.tenant):
            return
        self._events.append(event)
        self._due.set()
        if len(self._events) > MOST_WAITING:
            message = f"more than {MOST_WAITING:,} events waited for this subscriber; subscribe again"
            self.fail(DataLoss("subscription", self.base_digest, message, reason="SUBSCRIBER_TOO_SLOW"))

    def fail(self, error: CallError) -> None:
        """End the subscription with an error; events that wait are dropped."""
        self._error = self._error or error
        self._events.clear()
        self._due.set()

    async def next_events(self) -> list[BlockEvent]:
        """Wait for events and return the next ones, in order. Raises the error that ended the subscription."""
        await self._due.wait()
        if self._error is not None:
            raise self._error
        events = [self._events.popleft() for _ in range(min(len(self._events), MOST_AT_ONCE))]
        if not self._events:
            self._due.clear()
        return events


class _Worker:
    """The keys of the blocks of a link's worker, and its base model's digest."""

    def __init__(self) -> None:
        self.base = ""
        self.keys: set[int] = set()
        # While the worker tells of all its blocks: those that it has told of.
        self.told: set[int] | None = None
        self.has_listed = False


class BlockFeed:
    """Follows the workers' caches while there are subscribers."""

    def __init__(self, links: Collection[WorkerLink], most_blocks: int = MOST_BLOCKS) -> None:
        self._links = links
        self._most_blocks = most_blocks
        self._subscriptions: set[BlockSubscription] = set()
        self._workers: dict[WorkerLink, _Worker] = {}
        # The blocks of each base model by their keys.
        self._blocks: dict[str, dict[int, FollowedBlock]] = {}
        self._removals: set[asyncio.Task[None]] = set()
        # Blocks of all workers, each as often as it is there.
        self._total = 0
        # Set while every worker has told of all its blocks.
        self._all_listed = asyncio.Event()
        # The error of subscriptions once the router stops.
        self._stopped: CallError | None = None

    def subscribe(self, base_digest: str, sees: Callable[[str], bool]) -> BlockSubscription:
        """Return a subscription that begins with `blocks_of`; `unsubscribe` ends it.

        `sees` tells of a tenant whether the subscriber may see its blocks. Raises Unavailable where the router stops.
        """
        if self._stopped is not None:
            raise self._stopped
        subscription = BlockSubscription(base_digest, sees)
        self._subscriptions.add(subscription)
        if len(self._subscriptions) == 1:
            for link in self._links:
                self.up(link)
            self._count_listed()
        return subscription

    async def blocks_of(self, subscription: BlockSubscription) -> list[FollowedBlock]:
        """Return the blocks of a subscription that are there now; its events follow these."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LISTING_S):
                await self._all_listed.wait()
        subscription.begin()
        blocks = list(self._blocks.get(subscription.base_digest, {}).values())
        return await asyncio.to_thread(subscription.select, blocks)

    def unsubscribe(self, subscription: BlockSubscription) -> None:
        """End a subscription; with the last one workers are no longer followed."""
        self._subscriptions.discard(subscription)
        if not self._subscriptions:
            for link in self._workers:
                link.follow_blocks(False)
            self._forget()

    def stop(self) -> None:
        """End all subscriptions, and take no others: the router stops."""
        self._stopped = Unavailable("the router stops; subscribe at another one", reason="ROUTER_DRAINING")
        self._fail(self._stopped)

    def up(self, link: WorkerLink) -> None:
        """Follow a worker whose link has come up, if somebody subscribes."""
        if self._subscriptions:
            self._workers[link] = _Worker()
            self._count_listed()
            link.follow_blocks(True)

    def down(self, link: WorkerLink) -> None:
        """Take the blocks of a worker away whose link has broken."""
        worker = self._workers.pop(link, None)
        if worker is not None:
            self._count_listed()
            task = asyncio.create_task(self._remove_all(worker))
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    def changed(self, link: WorkerLink, changes: pb.BlockChanges) -> None:
        """Take a worker's changes."""
        worker = self._workers.get(link)
        if worker is None:  # it was followed until just now
            return
        if changes.lost:
            message = "a worker's changes came faster than this router read them; subscribe again"
            self._fail(DataLoss("subscription", changes.base_digest, message, reason="SUBSCRIBER_TOO_SLOW"))
            return
        worker.base = intern(changes.base_digest)
        if changes.begins:
            worker.told = set()
        self._remove(worker, changes.removed)
        for block in changes.stored:
            self._store(worker, block)
        if changes.complete and worker.told is not None:
            gone, worker.told = worker.keys - worker.told, None
            self._remove(worker, gone)
            worker.has_listed = True
            self._count_listed()
        if self._total > self._most_blocks:
            message = f"the workers have more than {self._most_blocks:,} blocks; give them a cell of their own"
            self._fail(Exhausted("blocks", message, retry_after_s=None, reason="TOO_MANY_BLOCKS"))

    def _count_listed(self) -> None:
        if all(worker.has_listed for worker in self._workers.values()):
            self._all_listed.set()
        else:
            self._all_listed.clear()

    def _store(self, worker: _Worker, stored: pb.CachedBlock) -> None:
        key = stored.key
        if len(stored.token_ids) % _ID_BYTES:
            return
        if worker.told is not None:
            worker.told.add(key)
        if key in worker.keys:
            return
        worker.keys.add(key)
        self._total += 1
        blocks = self._blocks.setdefault(worker.base, {})
        if (block := blocks.get(key)) is None:
            parent = stored.parent if stored.HasField("parent") else None
            block = FollowedBlock(key, parent, intern(stored.tenant), intern(stored.adapter), stored.token_ids)
            blocks[key] = block
            self._tell(worker.base, BlockEvent(block, stored=True))
        block.copies += 1

    def _remove(self, worker: _Worker, keys: Iterable[int]) -> None:
        blocks = self._blocks.get(worker.base, {})
        for key in keys:
            if key not in worker.keys:
                continue
            worker.keys.remove(key)
            if worker.told is not None:
                worker.told.discard(key)
            self._total -= 1
            block = blocks[key]
            block.copies -= 1
            if not block.copies:
                del blocks[key]
                self._tell(worker.base, BlockEvent(block, stored=False))

    async def _remove_all(self, worker: _Worker) -> None:
        """Remove what a worker had, in pieces; what is there when nobody subscribes any more is gone already."""
        blocks, keys = self._blocks, list(worker.keys)
        for start in range(0, len(keys), _REMOVED_AT_ONCE):
            if self._blocks is not blocks:
                return
            self._remove(worker, keys[start : start + _REMOVED_AT_ONCE])
            await asyncio.sleep(0)

    def _tell(self, base: str, event: BlockEvent) -> None:
        for subscription in self._subscriptions:
            if subscription.base_digest == base:
                subscription.add(event)

    def _fail(self, error: CallError) -> None:
        """End all subscriptions; those that come again follow the workers anew."""
        for subscription in list(self._subscriptions):
            subscription.fail(error)
            self.unsubscribe(subscription)

    def _forget(self) -> None:
        self._workers, self._blocks, self._total = {}, {}, 0
