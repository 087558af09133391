"""A run of all attacks on one cluster."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.trials.forged.attacks import ATTACKS, REFUSED_BY
from tests.trials.forged.cluster import audited, running
from tests.trials.forged.stage import set_stage


@dataclass(frozen=True)
class Result:
    """The tries and the accepted ones by attack, and the refusals that the audit log of each process has."""

    attacks: dict[str, tuple[int, int]]
    audited: dict[str, int]

    @property
    def tries(self) -> int:
        """Return the number of tries."""
        return sum(tries for tries, _ in self.attacks.values())

    @property
    def holds(self) -> bool:
        """Return whether nothing was accepted, and each process has a refusal in its log for each try at it."""
        tries_at = Counter[str]()
        for name, (tries, _) in self.attacks.items():
            tries_at[REFUSED_BY.get(name, "worker")] += tries
        in_logs = all(self.audited[process] >= tries for process, tries in tries_at.items())
        return in_logs and not any(accepted for _, accepted in self.attacks.values())

    @property
    def accepted(self) -> int:
        """Return how many were accepted."""
        return sum(accepted for _, accepted in self.attacks.values())


async def attack(directory: Path, tries: int, seed: int) -> Result:
    """Run a cluster in `directory`, and make so many tries in all, as many of each attack."""
    found: dict[str, tuple[int, int]] = {}
    async with running(directory) as cluster:
        stage = await set_stage(cluster, seed)
        for name, make in ATTACKS.items():
            share = -(-tries // len(ATTACKS))
            found[name] = share, await make(stage, share)
    return Result(found, audited(directory))
