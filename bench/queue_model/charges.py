"""The charges of claimed jobs, as broker/lua/include/charges.lua keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.queue_model.tenant_counters import TenantCounters
from bench.queue_model.waiting_jobs import WaitingJob
from broker import terms
from broker.terms import UsageReport


@dataclass(frozen=True, slots=True)
class _Record:
    """The amount that a claimed job's tenant has been charged."""

    tenant: str
    weight: float
    attempt: int
    tokens: int
    # The cost of the prompt for as long as it may be refunded, and the refund that the next claim charges again.
    refundable: float
    refunded: float = 0.0


class Charges:
    """Keeps the amount that each claimed job's tenant has been charged, so that each token is charged once."""

    def __init__(self, counters: TenantCounters) -> None:
        self._counters = counters
        self._records: dict[str, _Record] = {}

    def charge_claim(self, job: WaitingJob, *, loads: bool) -> None:
        """Charge the prompt and the load at the first claim of the first attempt, or of one that no worker has had.

        A refund is charged again at the next claim.
        """
        entry, record, counters = job.entry, self._records.get(job.job_id), self._counters
        if record is None:
            refundable = 0.0
            if entry.attempt == 1 or not job.has_begun:
                refundable = terms.PROMPT_WEIGHT * entry.prompt / entry.weight
                counters.charge(entry.tenant, refundable + (entry.load / entry.weight if loads else 0))
        elif record.attempt < entry.attempt or record.refunded:
            counters.charge(entry.tenant, record.refunded)
            refundable = record.refundable + record.refunded
        else:
            return
        self._records[job.job_id] = _Record(entry.tenant, entry.weight, entry.attempt, 0, refundable)

    def charge(self, reports: Sequence[UsageReport]) -> None:
        """Charge tenants what their jobs have made since the last report."""
        for report in reports:
            record = self._records.get(report.job_id)
            if record is not None and record.attempt == report.attempt:
                self._charge_report(report, record)

    def _charge_report(self, report: UsageReport, record: _Record) -> None:
        counters, new_tokens = self._counters, report.tokens - record.tokens
        if new_tokens > 0:
            counters.charge(record.tenant, terms.OUTPUT_WEIGHT * new_tokens / record.weight)
        refundable = 0.0 if report.ran else record.refundable
        if not report.ended:
            tokens = max(report.tokens, record.tokens)
            self._records[report.job_id] = replace(record, tokens=tokens, refundable=refundable)
        elif refundable:
            counters.charge(record.tenant, -refundable)
            self._records[report.job_id] = replace(record, refundable=0.0, refunded=refundable)
        elif not record.refunded:
            del self._records[report.job_id]

    def forget(self, job_id: str, attempt: int) -> None:
        """Forget a job's charges, up to this attempt."""
        record = self._records.get(job_id)
        if record is not None and record.attempt <= attempt:
            del self._records[job_id]
