"""The messages of the engine protocol's SubscribeKvEvents, made of the events of the workers' prefix caches.

    snapshot, in parts   sequence 1, 2, ...: all blocks cleared, then those that are there now, parents first
    changes              the next sequence numbers, one by one

A block's hash is the first 64 bits of its key, which depends on its ids, the block before it, adapter and tenant.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from smg_grpc_proto.generated import common_pb2 as pb

from router.dispatch.block_feed import MOST_AT_ONCE, BlockEvent, FollowedBlock


class KvEventBatches:
    """Makes the batches of one stream, and numbers them and their events from 1."""

    def __init__(self) -> None:
        self._batches, self._events = count(1), count(1)

    def snapshot(self, blocks: Sequence[FollowedBlock]) -> Iterator[Any]:
        """Yield the batches that replace whatever the subscriber knows; their events have the number 0."""
        starts = range(0, max(1, len(blocks)), MOST_AT_ONCE)
        for index, start in enumerate(starts):
            batch = self._new_batch()
            batch.snapshot.MergeFrom(pb.KvSnapshotChunk(index=index, count=len(starts), blocks=len(blocks)))
            if index == 0:
                batch.events.add().cleared.SetInParent()
            part = blocks[start : start + MOST_AT_ONCE]
            batch.events.extend(pb.KvCacheEvent(stored=_stored(run)) for run in _runs(part))
            yield batch

    def changes(self, events: Iterable[BlockEvent]) -> Any:
        """Return the batch of events that followed each other."""
        batch = self._new_batch()
        for stored, blocks in _alike(events):
            if stored:
                batch.events.extend(
                    pb.KvCacheEvent(event_id=next(self._events), stored=_stored(run)) for run in _runs(blocks)
                )
                continue
            event = batch.events.add(event_id=next(self._events))
            event.removed.block_hashes.extend(block.key for block in blocks)
            event.removed.tier = pb.KV_CACHE_TIER_DEVICE
        return batch

    def _new_batch(self) -> Any:
        # All workers are one rank, as in GetLoads.
        return pb.KvEventBatch(sequence_number=next(self._batches), timestamp=time.time(), dp_rank=0)


def _alike(events: Iterable[BlockEvent]) -> Iterator[tuple[bool, list[FollowedBlock]]]:
    """Yield the blocks of events of one kind that follow each other."""
    kind, blocks = True, list[FollowedBlock]()
    for event in events:
        if event.stored != kind and blocks:
            yield kind, blocks
            blocks = []
        kind = event.stored
        blocks.append(event.block)
    if blocks:
        yield kind, blocks


def _runs(blocks: Iterable[FollowedBlock]) -> Iterator[list[FollowedBlock]]:
    """Yield blocks of which each follows the one before it."""
    run: list[FollowedBlock] = []
    for block in blocks:
        if run and block.parent != run[-1].key:
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _stored(run: Sequence[FollowedBlock]) -> Any:
    """Return the event of blocks of one sequence; their adapter as a request's lora_id names it."""
    first = run[0]
    adapter, _, digest = first.adapter.rpartition("/revisions/")
    return pb.KvBlocksStored(
        blocks=[_block(block) for block in run],
        parent_block_hash=first.parent,
        tier=pb.KV_CACHE_TIER_DEVICE,
        lora_name=(f"{adapter}@{digest}" if adapter else first.adapter) or None,
        cache_salt=first.tenant,
    )


def _block(block: FollowedBlock) -> Any:
    ids = array("I", block.token_ids)
    return pb.KvBlock(block_hash=block.key, token_ids=ids, block_size=len(ids))
