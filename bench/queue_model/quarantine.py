"""The quarantine of tenants and adapters whose jobs kill engines, as broker/lua/record_death.lua keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from broker import terms
from broker.queue_entry import Entry


@dataclass(frozen=True, slots=True)
class _Deaths:
    count: int
    at_ms: int
    job_id: str


class QuarantineModel:
    """Refused tenants, and pairs of tenant and adapter, each until a time."""

    def __init__(self) -> None:
        self._deaths: dict[tuple[str, str], _Deaths] = {}
        self._until_ms: dict[str | tuple[str, str], int] = {}

    def refused_ms(self, entry: Entry, now_ms: int) -> int:
        """Return for how many ms more a job is refused; 0: it is not. Jobs that have begun go on, but for suspects."""
        begun = entry.attempt > 1 and entry.prefill > entry.prompt and entry.rows < terms.ALL_ROWS
        return 0 if begun else self.left_ms(entry.tenant, entry.adapter, now_ms)

    def left_ms(self, tenant: str, adapter: str, now_ms: int) -> int:
        """Return for how many ms more the jobs of a tenant with an adapter are refused; 0: they are not."""
        return max(self._left_ms(subject, now_ms) for subject in (tenant, (tenant, adapter)))

    def _left_ms(self, subject: str | tuple[str, str], now_ms: int) -> int:
        left_ms = self._until_ms.get(subject, 0) - now_ms
        return left_ms if 0 < left_ms <= terms.QUARANTINE_LIMIT_MS else 0

    def record_death(self, tenant: str, adapter: str, job_id: str, now_ms: int) -> int:
        """Record a job that engines died of; returns for how many ms its tenant and adapter are refused."""
        pair, memory_ms = (tenant, adapter), terms.DEATHS_MEMORY_MS
        self._until_ms = {subject: until for subject, until in self._until_ms.items() if until > now_ms}
        self._deaths = {pair: past for pair, past in self._deaths.items() if 0 <= now_ms - past.at_ms < memory_ms}
        past = self._deaths.get(pair, _Deaths(0, 0, ""))
        if past.job_id != job_id:
            self._deaths[pair] = _Deaths(past.count + 1, now_ms, job_id)
            self._refuse(pair, past.count + 1, now_ms)
            others = sum(other[0] == tenant and other != pair for other in self._deaths)
            if others:
                self._refuse(tenant, others, now_ms)
        return self.left_ms(tenant, adapter, now_ms)

    def forget_tenant(self, tenant: str) -> None:
        """Forget the deaths and refusals of a tenant."""
        self._deaths = {pair: past for pair, past in self._deaths.items() if pair[0] != tenant}
        self._until_ms = {one: until for one, until in self._until_ms.items() if tenant not in (one, one[0])}

    def _refuse(self, subject: str | tuple[str, str], deaths: int, now_ms: int) -> None:
        refused_ms = min(terms.QUARANTINE_MS * terms.QUARANTINE_GROWTH ** (deaths - 1), terms.QUARANTINE_LIMIT_MS)
        self._until_ms[subject] = now_ms + max(refused_ms, self._left_ms(subject, now_ms))
