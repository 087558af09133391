"""The owners of the KV cache's blocks, with automatic prefix caching. Block ids are 0 to blocks - 1.

            allocate, extend                  release (last reference, key known)
   free ─────────────────────▶ referenced ────────────────────────────────────▶ cached
    ▲                           │      ▲                                          │ │
    └───────────────────────────┘      └────────── allocate, same key ────────────┘ │
     release (last reference, no key)                                               │
    ◀──────────────────── taken when nothing is free: least recently used first ────┘

A block gets its key (Sequence.full_block_keys) once it is full and computed; sequences with the same key share it. A
shared block is never written: a sequence writes behind its computed tokens only, and those it shares are full.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable
from itertools import islice

from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import CachedBlock, Removal

# Bytes of a key's number: outside the engine blocks are known by it.
_NUMBER_BYTES = 8
_NO_CONTENT: tuple[bytes | None, str, bytes] = (None, "", b"")


class BlockJournal:
    """The keys that a prefix cache has got and lost, and that its followers have not been told of yet.

    A key that comes and goes meanwhile is not told of at all, so there are never more than blocks.
    """

    def __init__(self, keys: Iterable[bytes]) -> None:
        """Begin with a list of all keys, parents before children."""
        self._stored = dict.fromkeys(keys)
        self._removed: dict[bytes, None] = {}
        self._begins = True

    def stored(self, key: bytes) -> None:
        """Note a key that the cache has got."""
        if key in self._removed:
            del self._removed[key]
        else:
            self._stored[key] = None

    def removed(self, key: bytes) -> None:
        """Note a key that the cache has lost."""
        if key in self._stored:
            del self._stored[key]
        else:
            self._removed[key] = None

    def take(self, most: int) -> tuple[list[bytes], list[bytes], bool, bool] | None:
        """Return the next keys, of which at most `most` are stored ones; None: there are none.

        They are the lost keys, the stored ones, whether the list of all begins here, and whether nothing is left.
        """
        if not (self._begins or self._stored or self._removed):
            return None
        begins, self._begins = self._begins, False
        removed, self._removed = list(self._removed), {}
        stored = list(islice(self._stored, most))
        for key in stored:
            del self._stored[key]
        return removed, stored, begins, not self._stored


class BlockIntegrityError(Exception):
    """The accounting of blocks contradicts itself; going on would mix up sequences' keys and values."""


class BlockManager:
    """Counts references to blocks, and finds those that a sequence can share."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._free = list(range(blocks - 1, -1, -1))
        # Blocks without references whose content is still good; least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * blocks
        self._key_of: list[bytes | None] = [None] * blocks
        self._block_of: dict[bytes, int] = {}
        # Tenant and adapter digest of each block that has a key.
        self._owner_of = [("", "")] * blocks
        # The key before it, the adapter's name and the ids of each block that has a key: for followers, who are told of
        # all blocks when they begin.
        self._content_of: list[tuple[bytes | None, str, bytes]] = [_NO_CONTENT] * blocks
        # None: nobody follows.
        self.journal: BlockJournal | None = None

    @property
    def free(self) -> int:
        """Return how many blocks hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Return how many blocks without a reference a later sequence may still share."""
        return len(self._cached)

    @property
    def referenced(self) -> int:
        """Return how many blocks are in some sequence's table."""
        return self.blocks - len(self._free) - len(self._cached)

    def needed(self, tokens: int) -> int:
        """Return how many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, sequence: Sequence) -> bool:
        """Give a sequence blocks for all its ids, and set `computed` to what the cache holds of them already.

        False, and nothing changed, where not enough blocks are left. At least one id is left to compute.
        """
        hits = self._cached_prefix(sequence)
        if self._shortage(sequence, hits) > 0:
            return False
        missing = self.needed(len(sequence.ids)) - len(hits)
        for block in hits:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1
        sequence.block_table = hits + [self._take() for _ in range(missing)]
        sequence.registered = len(hits)
        sequence.computed = len(hits) * self.block_size
        return True

    def shortage(self, sequence: Sequence) -> int:
        """Return how many blocks more must lose their references before `allocate` succeeds; 0 or less: none."""
        return self._shortage(sequence, self._cached_prefix(sequence))

    def _shortage(self, sequence: Sequence, hits: list[int]) -> int:
        idle_hits = sum(not self._references[block] for block in hits)
        return self.needed(len(sequence.ids)) - len(hits) + idle_hits - len(self._free) - len(self._cached)

    def extend(self, sequence: Sequence) -> bool:
        """Give a sequence one more block. False, and nothing changed, where none is left."""
        if not self._free and not self._cached:
            return False
        sequence.block_table.append(self._take())
        return True

    def register(self, sequence: Sequence, tokens: int) -> None:
        """Let the prefix cache know the blocks that a sequence's first `tokens` ids, all computed, fill."""
        full = tokens // self.block_size
        keys = sequence.full_block_keys(full, self.block_size)
        for index in range(sequence.registered, full):
            block = sequence.block_table[index]
            adapter = sequence.adapter_of((index + 1) * self.block_size - 1)
            name = (adapter.name or adapter.digest) if adapter else ""
            # Two sequences may have computed the same block side by side; the first one's is shared.
            if self._block_of.setdefault(keys[index], block) == block:
                self._key_of[block] = keys[index]
                self._owner_of[block] = sequence.spec.tenant, adapter.digest if adapter else ""
                self._content_of[block] = keys[index - 1] if index else None, name, sequence.block_ids[index]
                if self.journal is not None:
                    self.journal.stored(keys[index])
        sequence.registered = full

    def follow(self, on: bool) -> None:
        """Begin a journal with all blocks that the prefix cache has, or end it."""
        self.journal = BlockJournal(self._block_of) if on else None

    def changes(self, most: int) -> tuple[list[int], list[CachedBlock], bool, bool] | None:
        """Return the next changes for followers, of which at most `most` are stored blocks; see BlockJournal.take."""
        changes = self.journal.take(most) if self.journal is not None else None
        if changes is None:
            return None
        removed, stored, begins, complete = changes
        return [_number(key) for key in removed], [self._cached_block(key) for key in stored], begins, complete

    def _cached_block(self, key: bytes) -> CachedBlock:
        block = self._block_of[key]
        parent, adapter, ids = self._content_of[block]
        tenant, _ = self._owner_of[block]
        return CachedBlock(_number(key), None if parent is None else _number(parent), tenant, adapter, ids)

    def release_blocks(self, sequence: Sequence) -> None:
        """Take a sequence's blocks back; nothing of it is computed afterwards."""
        # The last block first: of a cached chain the tail goes before what leads to it.
        for block in reversed(sequence.block_table):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._key_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None
        sequence.block_table = []
        sequence.registered = 0
        sequence.computed = 0

    def forget_tenant(self, tenant: str, kept_adapters: Container[str]) -> Removal:
        """Take the cached blocks of a tenant out of the prefix cache, and those of adapters that are not kept.

        Blocks with references stay, and count as left. Takes time O(blocks).
        """
        removed = in_use = 0
        for block, key in enumerate(self._key_of):
            owner, adapter = self._owner_of[block]
            if key is None or (owner != tenant and (not adapter or adapter in kept_adapters)):
                continue
            if self._references[block]:
                in_use += 1
                continue
            del self._cached[block]
            self._forget_key(block, key)
            self._free.append(block)
            removed += 1
        return Removal(removed, in_use)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise BlockIntegrityError unless exactly these sequences hold references. Takes time O(blocks)."""
        held = Counter(block for sequence in sequences for block in sequence.block_table)
        owners = Counter([*self._free, *self._cached, *set(held)])
        for block in range(self.blocks):
            if self._references[block] != held[block]:
                raise BlockIntegrityError(f"block {block}: {self._references[block]} references, {held[block]} in use")
            if owners[block] != 1:
                raise BlockIntegrityError(f"block {block} is in {owners[block]} of free, cached and referenced")
            key = self._key_of[block]
            if key is not None and self._block_of.get(key) != block:
                raise BlockIntegrityError(f"block {block}: the prefix cache has another block under its key")
        if len(self._block_of) != sum(key is not None for key in self._key_of):
            raise BlockIntegrityError("the prefix cache knows blocks without a key")

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        full = sequence.skippable // self.block_size
        hits = []
        for key in sequence.full_block_keys(full, self.block_size)[:full]:
            block = self._block_of.get(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            key = self._key_of[block]
            if key is not None:
                self._forget_key(block, key)
        self._references[block] = 1
        return block

    def _forget_key(self, block: int, key: bytes) -> None:
        del self._block_of[key]
        self._key_of[block] = None
        self._content_of[block] = _NO_CONTENT
        if self.journal is not None:
            self.journal.removed(key)


def _number(key: bytes) -> int:
    return int.from_bytes(key[:_NUMBER_BYTES], "big", signed=True)
