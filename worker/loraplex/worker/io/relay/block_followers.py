"""The routers that follow the worker's prefix cache: each has messages of its own that wait, so many at most."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.worker.ipc import BlockChanges

# Maximum number of messages that wait for a router, of at most 512 blocks each. A router that reads slower follows no
# longer.
_WAITING_LIMIT = 128


class Follower(Protocol):
    """The link to a router."""

    def wake(self) -> None:
        """Send what waits."""


class BlockFollowers:
    """Tells routers of the prefix cache of the worker's base model while they follow it."""

    def __init__(self, base_digest: str, waiting_limit: int = _WAITING_LIMIT) -> None:
        self._base_digest = base_digest
        self._waiting_limit = waiting_limit
        self._waiting: dict[Follower, deque[pb.BlockChanges]] = {}
        # Links that are to be told that they follow no longer.
        self._lost: set[Follower] = set()
        # Lets the engine tell of its prefix cache, first of all that it has, or no more.
        self.follow_engine: Callable[[bool], None] = lambda on: None

    def follow(self, link: Follower, on: bool) -> None:
        """Let a router follow: all that do are then told of all blocks. Or let it follow no more."""
        self._lost.discard(link)
        if on:
            self._waiting[link] = deque()
            self.follow_engine(True)
        elif self._waiting.pop(link, None) is not None and not self._waiting:
            self.follow_engine(False)

    def changed(self, changes: BlockChanges) -> None:
        """Tell the routers of changes."""
        stored = [
            pb.CachedBlock(
                key=one.key, parent=one.parent, tenant=one.tenant, adapter=one.adapter, token_ids=one.token_ids
            )
            for one in changes.stored
        ]
        message = pb.BlockChanges(
            base_digest=self._base_digest, removed=changes.removed, stored=stored, begins=changes.begins,
            complete=changes.complete,
        )  # fmt: skip
        for link, waiting in list(self._waiting.items()):
            if len(waiting) < self._waiting_limit:
                waiting.append(message)
            else:
                self.follow(link, False)
                self._lost.add(link)
            link.wake()

    def next_message(self, link: Follower) -> pb.BlockChanges | None:
        """Return the next message to a router; None: there is none."""
        if link in self._lost:
            self._lost.remove(link)
            return pb.BlockChanges(lost=True)
        waiting = self._waiting.get(link)
        return waiting.popleft() if waiting else None
