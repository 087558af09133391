"""The verdict on a history: what was counted, and what was found wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.trials.chaos.history import Left
from tests.trials.chaos.plan import Kind

# Kinds whose victim is a process that has streams, and the number of faults of which at least one must hit one.
STRIKES = (Kind.WORKER_KILL, Kind.WORKER_HANG, Kind.ENGINE_KILL, Kind.ENGINE_HANG, Kind.ROUTER_KILL)
MANY = 5


@dataclass
class Verdict:
    """Counts of tokens, but `requests`, `completed` and `refused`, which count requests and calls.

    `gaps`: by kind of fault the longest silence, in seconds, of each stream that such a fault hit. `crowd` counts the
    calls of crowds by their end, `refusals` all calls that ended with an error by status and reason.
    """

    requests: int = 0
    completed: int = 0
    refused: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    wrong_adapter: int = 0
    stale_attempt_delivered: int = 0
    # Everything else that an answer differs in: text, reason, log probabilities, a token of nobody's.
    other: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    # Faults that hit at least one stream, by kind.
    hits: Counter[str] = field(default_factory=Counter)
    planned: dict[str, int] = field(default_factory=dict)
    gaps: dict[str, list[float]] = field(default_factory=dict)
    crowd: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    # Tokens of completed requests as clients got them, and as their usage events have them; of all requests as events
    # and accounts have them; and where these differ.
    client_tokens: int = 0
    charged_tokens: int = 0
    event_tokens: int = 0
    account_tokens: int = 0
    miscounted: list[str] = field(default_factory=list)
    # Requests that ended because their tenant's quota was used, and the commands a second of Redis for an idle cluster.
    over_quota: int = 0
    idle_commands_s: float | None = None
    # Calls that went on elsewhere because a ping was late, though nothing had broken their connections.
    late_pings: int = 0
    left: Left | None = None
    findings: list[str] = field(default_factory=list)

    @property
    def not_fired(self) -> list[str]:
        """Kinds of which fewer happened than were planned."""
        return [kind for kind, count in self.planned.items() if self.faults[kind] < count]

    @property
    def vain(self) -> list[str]:
        """Kinds that strike processes with streams, of which many happened and none hit a stream."""
        return [kind for kind in STRIKES if self.faults[kind] >= MANY and not self.hits[kind]]

    @property
    def leaks(self) -> int:
        """Blocks, pins and keys that an idle cluster still held; at least 1 when nobody looked."""
        return self.left.blocks + self.left.pins + len(self.left.redis_keys) if self.left else 1

    @property
    def holds(self) -> bool:
        """Tell whether the promise was kept and every planned fault was tried."""
        wrong = self.lost + self.duplicated + self.reordered + self.wrong_adapter + self.stale_attempt_delivered
        whole = self.completed + self.over_quota == self.requests > 0
        return whole and not (wrong or self.other or self.leaks or self.not_fired or self.vain or self.findings)
