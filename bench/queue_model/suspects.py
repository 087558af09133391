"""Jobs that engines may have died of, and their tenants and adapters, as broker/lua/include/suspects.lua keeps them."""

from __future__ import annotations

from dataclasses import dataclass

from broker import terms
from broker.queue_entry import Entry


@dataclass(slots=True)
class _Suspect:
    tenant: str
    adapter: str
    attempt: int
    # 0: only its tenant and adapter are suspect.
    strikes: int
    until_ms: int
    # Time until which a worker is taken to have the job.
    busy_until_ms: int = 0


class SuspectsModel:
    """The suspects of a cell."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Suspect] = {}

    def look(self, now_ms: int) -> None:
        """Drop the entries that have ended, and those that cannot have been made by now: the clock went back."""
        last_ms, busy_ms = now_ms + terms.SUSPECT_MS, now_ms + terms.TRIED_MS
        self._jobs = {
            job_id: suspect
            for job_id, suspect in self._jobs.items()
            if now_ms < suspect.until_ms <= last_ms and suspect.busy_until_ms <= busy_ms
        }

    def strike(self, job_id: str, entry: Entry, now_ms: int) -> None:
        """Record a job with a strike that comes into the queue."""
        until_ms = now_ms + terms.SUSPECT_MS
        self._jobs[job_id] = _Suspect(entry.tenant, entry.adapter, entry.attempt, entry.strikes, until_ms)

    def begin_apart(self, entry: Entry) -> bool:
        """Return whether a job begins apart from other tenants' jobs: it, or its tenant and adapter, is suspect."""
        begun = entry.attempt > 1 and entry.prefill > entry.prompt and entry.rows < terms.ALL_ROWS
        if begun:
            return False
        live = [suspect for suspect in self._jobs.values() if suspect.strikes]
        pairs = {(suspect.tenant, suspect.adapter) for suspect in live}
        if (entry.tenant, entry.adapter) in pairs or sum(tenant == entry.tenant for tenant, _ in pairs) > 1:
            return True
        return bool(entry.adapter) and sum(adapter == entry.adapter for _, adapter in pairs) > 1

    def is_another_tried(self, job_id: str, entry: Entry, now_ms: int) -> bool:
        """Return whether a worker has another job of the tenant with the adapter that engines may die of."""
        others = (suspect for other, suspect in self._jobs.items() if other != job_id)
        pair = entry.tenant, entry.adapter
        return any(other.busy_until_ms > now_ms and (other.tenant, other.adapter) == pair for other in others)

    def try_job(self, job_id: str, entry: Entry, now_ms: int) -> None:
        """Record that a worker has claimed a job that begins apart."""
        busy_until_ms = now_ms + terms.TRIED_MS
        strikes, until_ms, known = 0, busy_until_ms, self._jobs.get(job_id)
        if known is not None and known.attempt == entry.attempt and known.strikes:
            strikes, until_ms = known.strikes, known.until_ms
        self._jobs[job_id] = _Suspect(entry.tenant, entry.adapter, entry.attempt, strikes, until_ms, busy_until_ms)

    def report(self, job_id: str, attempt: int, tokens: int, now_ms: int, *, ended: bool) -> None:
        """Take a worker's report of an attempt: a token clears its job, unless it is on trial."""
        suspect = self._jobs.get(job_id)
        if suspect is None or suspect.attempt != attempt:
            return
        if (tokens and suspect.strikes < terms.TRIAL_STRIKES) or (ended and not suspect.strikes):
            del self._jobs[job_id]
            return
        suspect.busy_until_ms = 0 if ended else now_ms + terms.TRIED_MS
        if not suspect.strikes:
            suspect.until_ms = suspect.busy_until_ms

    def forget_tenant(self, tenant: str, now_ms: int) -> None:
        """Forget the suspects of a tenant."""
        self.look(now_ms)
        self._jobs = {job_id: suspect for job_id, suspect in self._jobs.items() if suspect.tenant != tenant}

    def convicted(self, job_id: str) -> None:
        """Forget a job that was ended because engines died of it: its tenant and adapter are in quarantine."""
        self._jobs.pop(job_id, None)
