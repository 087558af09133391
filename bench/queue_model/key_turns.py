"""Jobs and turns of the API keys in each tenant's queue, as broker/lua/include/key_turns.lua keeps them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from broker.queue_entry import Entry
from broker.terms import TURNS_LIMIT


@dataclass(slots=True)
class _TenantKeys:
    """The state of a tenant's keys."""

    # Whether the jobs that come have turns.
    has_turns: bool = False
    # Number and bytes of the newcomers of each key.
    jobs: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    # The highest turn of a claimed job by priority, and the end of each key's last turn by priority and key.
    claimed: Counter[int] = field(default_factory=Counter)
    finish: dict[tuple[int, str], float] = field(default_factory=dict)


class KeyTurns:
    """Counts the waiting jobs of keys, and gives turns to the jobs of tenants with a weighted key."""

    def __init__(self) -> None:
        self._tenants: defaultdict[str, _TenantKeys] = defaultdict(_TenantKeys)

    def waiting_of(self, entry: Entry) -> tuple[int, int]:
        """Return number and bytes of the newcomers of a job's key."""
        keys = self._tenants[entry.tenant]
        return keys.jobs[entry.key], keys.bytes[entry.key]

    def claimed_turn(self, tenant: str, priority: int) -> int:
        """Return the highest turn of the claimed jobs of a tenant in a priority."""
        return self._tenants[tenant].claimed[priority]

    def next_turn(self, entry: Entry) -> float | None:
        """Return the turn of a job; None: it needs none."""
        keys = self._tenants[entry.tenant]
        if not (keys.has_turns or entry.key_weight):
            return None
        turn = max(keys.claimed[entry.priority], keys.finish.get((entry.priority, _weighted_key(entry)), 0.0))
        return min(turn, TURNS_LIMIT)

    def add(self, entry: Entry, work: int, turn: float | None) -> None:
        """Count a newcomer, with its turn."""
        keys = self._tenants[entry.tenant]
        if entry.key:
            keys.jobs[entry.key] += 1
            keys.bytes[entry.key] += len(entry.body)
        if turn is not None:
            keys.has_turns = True
            keys.finish[entry.priority, _weighted_key(entry)] = turn + work / (entry.key_weight or 1)

    def remove(self, entry: Entry) -> None:
        """Count a newcomer no more."""
        keys = self._tenants[entry.tenant]
        if entry.key:
            keys.jobs[entry.key] -= 1
            keys.bytes[entry.key] -= len(entry.body)

    def note_claim(self, entry: Entry, turn: float | None) -> None:
        """Note that a job is claimed: no later job has an earlier turn."""
        if turn is not None:
            claimed = self._tenants[entry.tenant].claimed
            claimed[entry.priority] = max(claimed[entry.priority], math.floor(turn))

    def give_back(self, entry: Entry, work: int, turn: float | None) -> None:
        """Give the turn of a job that left without a claim back to its key."""
        place = entry.priority, _weighted_key(entry)
        finish = self._tenants[entry.tenant].finish
        if turn is not None and place in finish:
            finish[place] = max(0.0, finish[place] - work / (entry.key_weight or 1))

    def forget(self, tenant: str) -> None:
        """Forget a tenant whose queue is empty."""
        self._tenants.pop(tenant, None)


def _weighted_key(entry: Entry) -> str:
    """Return the key of a job; empty for those that have turns in common."""
    return entry.key if entry.key_weight else ""
