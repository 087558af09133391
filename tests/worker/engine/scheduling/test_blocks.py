"""Blocks are free, cached or referenced; sharing never changes what a sequence finds in its table."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from loraplex.worker.engine.scheduling.blocks import BlockIntegrityError, BlockManager
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import AdapterSource, CachedBlock, NewSequence, Removal

BLOCKS = 12
BLOCK_SIZE = 4


def new_sequence(
    ids: tuple[int, ...], tenant: str = "acme", adapter: str = "", arrival: int = 0, invoked_at: int = 0
) -> Sequence:
    source = AdapterSource(adapter, "") if adapter else None
    spec = NewSequence(f"s{arrival}", ids, adapter=source, tenant=tenant, invoked_at=invoked_at)
    return Sequence(spec, arrival, frozenset())


def compute(blocks: BlockManager, sequence: Sequence) -> None:
    """Compute everything pending, and make it known to the prefix cache, as a step does."""
    sequence.computed = len(sequence.ids)
    blocks.register(sequence, sequence.computed)


class BlockWalk:
    """Random sequences over few ids, so that prefixes meet; `content` is what a KV cache would hold."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.blocks = BlockManager(BLOCKS, BLOCK_SIZE)
        self.held: list[Sequence] = []
        # (block, offset) -> all that keys and values at this place depend on.
        self.content: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.count = 0
        # The blocks that a follower knows of; the keys that it has got since the list of all blocks began.
        self.known: dict[int, CachedBlock] = {}
        self.told: set[int] | None = None

    def entry(self, sequence: Sequence, position: int) -> tuple[Any, ...]:
        spec = sequence.spec
        adapters = [spec.adapter if place >= spec.invoked_at else None for place in range(position + 1)]
        return (spec.tenant, *zip(adapters, sequence.ids[: position + 1], strict=True))

    def go(self) -> None:
        """Walk to the end, where nothing is left. Walks differ in how often each operation comes."""
        operations = [self.allocate, self.compute_chunk, self.append, self.release, self.forget]
        weights = [self.chance.choice([1, 2, 4]) for _ in operations[:3]]
        weights += [self.chance.choice([0, 1, 1]) for _ in operations[3:]]
        for operation in self.chance.choices(operations, weights, k=60):
            operation()
            self.accounts_balance()
            self.everyone_finds_its_own()
            self.follow()
        while self.held:
            self.release()
            self.follow()
        self.a_follower_knows_all()
        self.blocks.check([])
        assert self.blocks.referenced == 0

    def allocate(self) -> None:
        length = self.chance.randint(1, 24)
        tenant, adapter = self.chance.choice(["acme", "globex"]), self.chance.choice(["", "a", "b"])
        ids = tuple(self.chance.choices([1, 2], [20, 1], k=length))
        invoked_at = self.chance.choice([0, self.chance.randrange(length)]) if adapter else 0
        sequence = new_sequence(ids, tenant, adapter, self.count, invoked_at)
        self.count += 1
        before = (self.blocks.free, self.blocks.cached)
        if not self.blocks.allocate(sequence):
            assert (self.blocks.free, self.blocks.cached) == before
            assert (sequence.block_table, sequence.computed) == ([], 0)
            return
        assert len(sequence.block_table) == self.blocks.needed(length)
        assert sequence.computed < length
        self.held.append(sequence)

    def compute_chunk(self) -> None:
        if not self.held:
            return
        sequence = self.chance.choice(self.held)
        end = min(sequence.computed + self.chance.randint(1, 8), len(sequence.ids))
        for position in range(sequence.computed, end):
            block = sequence.block_table[position // BLOCK_SIZE]
            others = [other for other in self.held if other is not sequence and block in other.block_table]
            assert not others, "a shared block is written"
            self.content[block, position % BLOCK_SIZE] = self.entry(sequence, position)
        sequence.computed = end
        self.blocks.register(sequence, end)

    def append(self) -> None:
        if not self.held:
            return
        sequence = self.chance.choice(self.held)
        if len(sequence.ids) == len(sequence.block_table) * BLOCK_SIZE and not self.blocks.extend(sequence):
            assert self.blocks.referenced == BLOCKS
            return
        sequence.ids.append(self.chance.choice([1, 2]))

    def release(self) -> None:
        if self.held:
            self.blocks.release_blocks(self.held.pop(self.chance.randrange(len(self.held))))

    def forget(self) -> None:
        tenant: str = self.chance.choice(["acme", "globex"])
        kept: tuple[str, ...] = self.chance.choice([(), ("a",), ("a", "b")])
        free, cached = self.blocks.free, self.blocks.cached
        found = self.blocks.forget_tenant(tenant, kept)
        assert (self.blocks.free - free, cached - self.blocks.cached) == (found.removed, found.removed)
        assert found.left <= self.blocks.referenced
        assert self.blocks.forget_tenant(tenant, kept) == Removal(0, found.left)

    def follow(self) -> None:
        """Follow the prefix cache now and then, anew or on, and read some of its changes."""
        if self.chance.random() < 0.05:
            self.blocks.follow(True)
        if self.chance.random() < 0.5:
            self.read_changes(most=self.chance.randint(1, 3))

    def read_changes(self, most: int) -> bool:
        if (changes := self.blocks.changes(most)) is None:
            return False
        removed, stored, begins, complete = changes
        assert len(stored) <= most
        if begins:
            self.told = set()
        for key in removed:
            self.known.pop(key, None)
        for block in stored:
            self.known[block.key] = block
            if self.told is not None:
                self.told.add(block.key)
        if complete and self.told is not None:
            self.known, self.told = {key: block for key, block in self.known.items() if key in self.told}, None
        return True

    def a_follower_knows_all(self) -> None:
        if self.blocks.journal is None:
            self.blocks.follow(True)
        while self.read_changes(most=2):
            pass
        cached = {int.from_bytes(key[:8], "big", signed=True): block for key, block in self.blocks._block_of.items()}
        assert self.known.keys() == cached.keys()
        for key, block in cached.items():
            told, content = self.known[key], [self.content[block, offset] for offset in range(BLOCK_SIZE)]
            (adapter, _), ids = content[-1][-1], [entry[-1][1] for entry in content]
            assert (told.tenant, told.adapter) == (content[0][0], getattr(adapter, "digest", ""))
            assert list(array("I", told.token_ids)) == ids
            assert (told.parent is None) == (len(content[0]) == 2)

    def accounts_balance(self) -> None:
        self.blocks.check(self.held)
        assert min(self.blocks.free, self.blocks.cached, self.blocks.referenced) >= 0
        assert self.blocks.free + self.blocks.cached + self.blocks.referenced == BLOCKS

    def everyone_finds_its_own(self) -> None:
        for sequence in self.held:
            for position in range(sequence.computed):
                place = (sequence.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
                assert self.content[place] == self.entry(sequence, position)


def test_random_walks() -> None:
    for seed in range(100):
        print(f"seed {seed}")
        BlockWalk(random.Random(seed)).go()


def test_a_second_sequence_shares_the_full_blocks_of_the_first() -> None:
    blocks = BlockManager(BLOCKS, BLOCK_SIZE)
    first, second = new_sequence(tuple(range(10))), new_sequence((*range(8), 99, 98))
    assert blocks.allocate(first)
    compute(blocks, first)
    assert blocks.allocate(second)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert (second.computed, blocks.referenced) == (8, 4)


def test_a_forgotten_tenant_finds_nothing_and_another_its_own() -> None:
    blocks = BlockManager(BLOCKS, BLOCK_SIZE)
    owners = {"acme": "", "globex": "", "initech": "gone", "hooli": "kept"}
    for tenant, adapter in owners.items():
        sequence = new_sequence(tuple(range(5)), tenant, adapter)
        assert blocks.allocate(sequence)
        compute(blocks, sequence)
        blocks.release_blocks(sequence)
    assert blocks.forget_tenant("acme", ["kept"]) == Removal(2, 0)
    found = {}
    for tenant, adapter in owners.items():
        again = new_sequence(tuple(range(5)), tenant, adapter)
        assert blocks.allocate(again)
        found[tenant] = again.computed
        blocks.release_blocks(again)
    assert found == {"acme": 0, "globex": 4, "initech": 0, "hooli": 4}


def test_activated_adapters_share_the_bases_blocks_before_their_invocations() -> None:
    blocks, ids = BlockManager(BLOCKS, BLOCK_SIZE), tuple(range(15))
    found: dict[tuple[str, int], list[int]] = {}
    for adapter, invoked_at in (("", 0), ("a", 9), ("b", 9), ("a", 9), ("a", 10), ("b", 8), ("b", 3), ("a", 0)):
        sequence = new_sequence(ids, "acme", adapter, invoked_at=invoked_at)
        assert blocks.allocate(sequence)
        found[adapter, invoked_at] = [*found.get((adapter, invoked_at), []), sequence.computed]
        compute(blocks, sequence)
        blocks.release_blocks(sequence)
    # The whole blocks before; its own the second time; another place in the same block is another content.
    assert found == {
        ("", 0): [0], ("a", 9): [8, 12], ("b", 9): [8], ("a", 10): [8], ("b", 8): [8], ("b", 3): [0], ("a", 0): [0]
    }  # fmt: skip
    stranger = new_sequence(ids, "globex", "a", invoked_at=9)
    assert blocks.allocate(stranger)
    assert stranger.computed == 0


def test_one_id_is_always_left_to_compute() -> None:
    blocks = BlockManager(BLOCKS, BLOCK_SIZE)
    first, second = new_sequence(tuple(range(8))), new_sequence(tuple(range(8)))
    assert blocks.allocate(first)
    compute(blocks, first)
    assert blocks.allocate(second)
    assert second.computed == 4


@pytest.mark.parametrize(("tenant", "adapter"), [("globex", "a"), ("acme", "b"), ("acme", ""), ("", "aacme")])
def test_other_tenants_and_adapters_share_nothing(tenant: str, adapter: str) -> None:
    blocks = BlockManager(BLOCKS, BLOCK_SIZE)
    first, second = new_sequence(tuple(range(10)), "acme", "a"), new_sequence(tuple(range(10)), tenant, adapter)
    assert blocks.allocate(first)
    compute(blocks, first)
    assert blocks.allocate(second)
    assert second.computed == 0
    assert not set(first.block_table) & set(second.block_table)


def test_cached_blocks_go_least_recently_used_first_and_tails_before_heads() -> None:
    blocks = BlockManager(6, BLOCK_SIZE)
    older, newer = new_sequence(tuple(range(12))), new_sequence(tuple(range(50, 62)))
    for sequence in (older, newer):
        assert blocks.allocate(sequence)
        compute(blocks, sequence)
    for sequence in (older, newer):
        blocks.release_blocks(sequence)
    assert (blocks.free, blocks.cached) == (0, 6)
    # One block for a stranger, one behind the newer chain: both are tails of the older one.
    assert blocks.allocate(new_sequence((7, 7, 7, 7)))
    newer_again = new_sequence((*range(50, 62), 1))
    assert blocks.allocate(newer_again)
    assert newer_again.computed == 12
    blocks.release_blocks(newer_again)
    older_again = new_sequence(tuple(range(12)))
    assert blocks.allocate(older_again)
    assert older_again.computed == 4


def test_what_does_not_fit_changes_nothing() -> None:
    blocks = BlockManager(2, BLOCK_SIZE)
    assert not blocks.allocate(new_sequence(tuple(range(9))))
    assert blocks.free == 2
    sequence = new_sequence(tuple(range(8)))
    assert blocks.allocate(sequence)
    assert not blocks.extend(sequence)


def test_check_sees_a_forgotten_reference() -> None:
    blocks = BlockManager(2, BLOCK_SIZE)
    assert blocks.allocate(new_sequence((1, 2)))
    with pytest.raises(BlockIntegrityError, match="1 references, 0 in use"):
        blocks.check([])
