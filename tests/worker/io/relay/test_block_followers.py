"""Routers that follow the prefix cache: what each is told, and when it is told no more."""

from __future__ import annotations

from loraplex.worker.engine_api import CachedBlock
from loraplex.worker.io.relay.block_followers import BlockFollowers
from loraplex.worker.ipc import BlockChanges


class Link:
    """Counts how often it was woken."""

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def changes(key: int) -> BlockChanges:
    return BlockChanges([], [CachedBlock(key, None, "acme", "", bytes(64))], begins=False, complete=True)


def test_every_follower_is_told_and_a_slow_one_is_dropped() -> None:
    orders: list[bool] = []
    followers, quick, slow = BlockFollowers("sha256:base", waiting_limit=2), Link(), Link()
    followers.follow_engine = orders.append
    followers.changed(changes(0))
    for link in (quick, slow):
        followers.follow(link, True)
        assert followers.next_message(link) is None, "nothing from before"
    for key in range(1, 4):
        followers.changed(changes(key))
        message = followers.next_message(quick)
        assert message is not None
        assert (message.base_digest, [one.key for one in message.stored]) == ("sha256:base", [key])
    lost = followers.next_message(slow)
    assert lost is not None
    assert lost.lost
    assert followers.next_message(slow) is None
    assert (quick.woken, slow.woken) == (3, 3)
    followers.follow(quick, False)
    # Each that begins to follow is told of all; the engine tells no more once nobody does.
    assert orders == [True, True, False]
