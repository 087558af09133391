"""The metrics of a worker. docs/reference/metrics.md explains them; a test compares the two."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.contracts.broker.messages import AdapterTiers
from loraplex.runtime.telemetry.logging import LogOnce
from loraplex.runtime.telemetry.metrics import LONG_S, PREFIX, SHORT_S, TOKENS, BoundedNames, Health, Meters
from loraplex.runtime.tenancy.audit_log import AuditCounts
from loraplex.worker.engine_api import EngineLimits, EngineStats

# The latest report of the engine, its limits, and the counts of the adapters on disk.
Report = tuple[EngineStats, EngineLimits, AdapterTiers]


class Readiness:
    """Says at the metrics' port why a worker gets no jobs: no engine serves, or no router its cell."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._serving, self._missing = False, ""
        self._once = LogOnce(logging.getLogger(__name__))

    def set_serving(self, serving: bool) -> None:
        """Note whether an engine serves."""
        self._serving = serving
        if serving:
            self._health.listens()
        self._tell()

    def note_routers(self, routers: Sequence[str], model: str, cell: str) -> None:
        """Note the routers that send jobs of the model to the worker's cell."""
        missing = f"waits for a router that serves {model} in cell {cell} of this Redis (--cells)"
        self._missing = "" if routers else missing
        if self._missing:
            self._once(self._missing)
        else:
            self._once.reset()
        self._tell()

    def _tell(self) -> None:
        self._health.set(self._missing if self._serving else "no engine serves")


class WorkerMetrics(Meters):
    """The metrics of a worker's I/O process, over all its engine sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.readiness = Readiness(self.health)
        self.claims = self.counter("claims", "Claims that were sent to the queue.")
        self.claimed = self.counter("jobs_claimed", "Jobs that claims returned.")
        self.seals_refused = self.counter(
            "seals_refused", "Entries of Redis that no router has sealed for this worker.", ("kind", "reason")
        )
        self.audit = AuditCounts(self)
        self.claim_time = self.histogram("claim_seconds", "Duration of a claim.", SHORT_S)
        self.ended = self.counter("jobs_ended", "Jobs that left this worker, by outcome.", ("outcome",))
        self.prefill_time = self.histogram(
            "request_prefill_time_seconds", "From handing a sequence to the engine to its first token.", LONG_S
        )
        self.decode_time = self.histogram("request_decode_time_seconds", "From the first token to the last.", LONG_S)
        self.fetch_wait = self.histogram(
            "request_adapter_fetch_time_seconds", "Wait for the adapter on the disk.", LONG_S
        )
        self.load_wait = self.histogram("request_adapter_load_time_seconds", "Wait for the adapter in a slot.", LONG_S)
        self.step_time = self.histogram("engine_step_seconds", "Time between two steps that gave tokens.", SHORT_S)
        self.batch_size = self.histogram("engine_batch_size", "Answers to which a step gave a token.", TOKENS[:12])
        self.engine_tokens = self.counter("engine_generation_tokens", "Tokens that the engine made.")
        self.tenant_tokens = self.counter(
            "worker_tenant_tokens", "Tokens that the engine made, by tenant.", ("tenant",)
        )
        self.engines_lost = self.counter("engines_lost", "Engine processes that died or were ended.")
        self.router_links = self.gauge("relay_routers", "Live routers, by whether this worker reaches them.", ("link",))
        self.messages = self.counter("relay_messages_sent", "Messages with frames to routers.")
        self.frames = self.counter("relay_frames_sent", "Frames in messages to routers.")
        self.fetches = self.counter("adapter_fetches", "Downloads from the store, by result.", ("result",))
        self.fetch_bytes = self.counter("adapter_fetch_bytes", "Bytes of adapters that were fetched.")
        self.fetch_time = self.histogram(
            "adapter_fetch_seconds", "Duration of fetching and verifying an adapter.", LONG_S
        )
        self.tenants = BoundedNames()
        self._engine = EngineCollector()
        self.registry.register(self._engine)

    def follow(self, report: Callable[[], Report]) -> None:
        """Read the engine's gauges from this report from now on."""
        self._engine.report = report


@dataclass(frozen=True, slots=True)
class _ReportedMetric:
    """A metric that is read from the reports; `read` returns a value for each of its label values."""

    name: str
    text: str
    read: Callable[[EngineStats, EngineLimits, AdapterTiers], Mapping[tuple[str, ...], float]]
    labels: tuple[str, ...] = ()
    counts: bool = False


def _stat(name: str, text: str, read: Callable[[EngineStats], float], *, counts: bool = False) -> _ReportedMetric:
    return _ReportedMetric(name, text, lambda stats, limits, disk: {(): read(stats)}, counts=counts)


_REPORTED = (
    _stat("num_requests_running", "Sequences in the batch.", lambda stats: stats.rows_running),
    _stat("num_requests_waiting", "Sequences in the engine that do not run yet.", lambda stats: stats.rows_waiting),
    _ReportedMetric("num_requests_limit", "Sequences that can run at once.", lambda s, limits, d: {(): limits.rows}),
    _ReportedMetric(
        "kv_cache_usage_perc",
        "Share of the KV blocks that are referenced, 0 to 1.",
        lambda stats, limits, d: {(): stats.blocks_referenced / limits.blocks},
    ),
    _ReportedMetric(
        "kv_blocks",
        "KV blocks.",
        lambda stats, limits, d: {
            ("free",): stats.blocks_free,
            ("cached",): stats.blocks_cached,
            ("referenced",): stats.blocks_referenced,
        },
        ("state",),
    ),
    _ReportedMetric(
        "adapter_slots",
        "Adapter slots on the device.",
        lambda stats, limits, d: {
            ("used",): stats.slots_used,
            ("pinned",): stats.slots_pinned,
            ("total",): limits.adapter_slots,
        },
        ("state",),
    ),
    _ReportedMetric(
        "adapter_bytes",
        "Bytes of adapters, by tier.",
        lambda stats, limits, disk: {
            ("device",): stats.tiers.device_bytes,
            ("host",): stats.tiers.host_bytes,
            ("disk",): disk.disk_bytes,
        },
        ("tier",),
    ),
    _stat("adapters_loading", "Adapters on their way from disk to the device.", lambda stats: stats.tiers.loading),
    _ReportedMetric(
        "adapters_fetching", "Adapters on their way from the store.", lambda s, limits, disk: {(): disk.fetching}
    ),
    _ReportedMetric(
        "adapter_requests",
        "Requests by whether a tier had their adapter.",
        lambda stats, limits, disk: {
            ("device", "hit"): stats.adapter_hits,
            ("device", "miss"): stats.adapter_misses,
            ("disk", "hit"): disk.disk_hits,
            ("disk", "miss"): disk.disk_misses,
        },
        ("tier", "result"),
        counts=True,
    ),
    _stat("adapter_loads", "Adapters that came into a slot.", lambda stats: stats.tiers.loads, counts=True),
    _stat("adapter_load_failures", "Adapters that failed to load.", lambda s: s.tiers.load_failures, counts=True),
    _stat("adapter_swaps", "Adapters that left their slot for another.", lambda stats: stats.tiers.swaps, counts=True),
    _stat("engine_steps", "Steps of the engine.", lambda stats: stats.steps, counts=True),
    _stat("engine_computed_tokens", "Tokens computed, prompts' too.", lambda stats: stats.computed_tokens, counts=True),
    _stat("spec_decode_num_drafts", "Drafts that steps checked.", lambda stats: stats.drafts, counts=True),
    _stat("spec_decode_num_draft_tokens", "Tokens that were drafted.", lambda stats: stats.drafted, counts=True),
    _stat("spec_decode_num_accepted_tokens", "Of these, those that came.", lambda stats: stats.accepted, counts=True),
    _stat("num_preemptions", "Sequences that had to give their blocks back.", lambda s: s.preemptions, counts=True),
    _stat("prefix_cache_queries", "Tokens looked for in the prefix cache.", lambda s: s.prefix_queries, counts=True),
    _stat("prefix_cache_hits", "Tokens found in the prefix cache.", lambda stats: stats.prefix_hits, counts=True),
)


class EngineCollector(Collector):
    """Metrics from the latest reports, read only when they are scraped. Counts begin again with every engine."""

    def __init__(self) -> None:
        self.report: Callable[[], Report] | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield every family, without samples while there is no engine."""
        report = self.report() if self.report is not None else None
        for metric in _REPORTED:
            kind = CounterMetricFamily if metric.counts else GaugeMetricFamily
            family = kind(f"{PREFIX}_{metric.name}", metric.text, labels=metric.labels)
            values = metric.read(*report) if report is not None else {}
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family
