"""What a worker counts and times. Names and meanings for people: docs/metrics.md, which a test holds to this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from telemetry.metrics import LONG_S, PREFIX, SHORT_S, TOKENS, BoundedNames, Meters
from worker.engine_api import EngineLimits, EngineStats


@dataclass(frozen=True, slots=True)
class FetchStats:
    """The disk tier now, and what was found there or not since the start."""

    bytes: int
    bytes_limit: int
    adapters: int
    fetching: int
    hits: int
    misses: int


class Source(Protocol):
    """What the engine of this incarnation last said, and the adapters on disk."""

    @property
    def limits(self) -> EngineLimits:
        """What the engine can take."""

    @property
    def stats(self) -> EngineStats:
        """What the engine holds."""

    @property
    def disk(self) -> FetchStats:
        """The adapters on disk now."""


class WorkerMetrics(Meters):
    """One worker's I/O process's, over all lives of its engine."""

    def __init__(self) -> None:
        super().__init__()
        self.claims = self.counter("claims", "Times that the queue was asked for jobs.")
        self.claimed = self.counter("jobs_claimed", "Jobs that it gave.")
        self.claim_time = self.histogram("claim_seconds", "To ask it.", SHORT_S)
        self.ended = self.counter("jobs_ended", "Jobs that are held no more, by what became of them.", ("outcome",))
        self.prefill_time = self.histogram("request_prefill_time_seconds", "From the engine to a first token.", LONG_S)
        self.decode_time = self.histogram("request_decode_time_seconds", "From that to the last token.", LONG_S)
        self.fetch_wait = self.histogram("request_adapter_fetch_time_seconds", "Wait for the adapter's bytes.", LONG_S)
        self.load_wait = self.histogram("request_adapter_load_time_seconds", "Wait for it in a slot.", LONG_S)
        self.step_time = self.histogram("engine_step_seconds", "Between two steps that gave tokens.", SHORT_S)
        self.batch_size = self.histogram("engine_batch_size", "Answers that a step gave a token.", TOKENS[:12])
        self.engine_tokens = self.counter("engine_generation_tokens", "Tokens that the engine made.")
        self.tenant_tokens = self.counter("worker_tenant_tokens", "Of these, by whose they were.", ("tenant",))
        self.engines_lost = self.counter("engines_lost", "Engine processes that died or were ended.")
        self.messages = self.counter("relay_messages_sent", "Messages with frames to routers.")
        self.frames = self.counter("relay_frames_sent", "Frames in them.")
        self.fetches = self.counter("adapter_fetches", "Downloads from the store, by result.", ("result",))
        self.fetch_bytes = self.counter("adapter_fetch_bytes", "Bytes of adapters that came.")
        self.fetch_time = self.histogram("adapter_fetch_seconds", "To fetch and verify an adapter.", LONG_S)
        self.tenants = BoundedNames()
        self._engine = EngineCollector()
        self.registry.register(self._engine)

    def follow(self, source: Source) -> None:
        """From now on this is the engine that the gauges tell of."""
        self._engine.source = source


@dataclass(frozen=True, slots=True)
class _Told:
    """A metric that is read off what the engine says; `read` gives a value for each of its label values."""

    name: str
    text: str
    read: Callable[[EngineStats, EngineLimits, FetchStats], Mapping[tuple[str, ...], float]]
    labels: tuple[str, ...] = ()
    counts: bool = False


def _one(name: str, text: str, read: Callable[[EngineStats], float], *, counts: bool = False) -> _Told:
    return _Told(name, text, lambda stats, limits, disk: {(): read(stats)}, counts=counts)


_TOLD = (
    _one("num_requests_running", "Sequences in the batch.", lambda stats: stats.rows_running),
    _one("num_requests_waiting", "Sequences in the engine that do not run yet.", lambda stats: stats.rows_waiting),
    _Told("num_requests_limit", "Sequences that can run at once.", lambda s, limits, d: {(): limits.rows}),
    _Told(
        "kv_cache_usage_perc",
        "Share of the KV blocks that are referenced, 0 to 1.",
        lambda stats, limits, d: {(): stats.blocks_referenced / limits.blocks},
    ),
    _Told(
        "kv_blocks",
        "KV blocks.",
        lambda stats, limits, d: {
            ("free",): stats.blocks_free,
            ("cached",): stats.blocks_cached,
            ("referenced",): stats.blocks_referenced,
        },
        ("state",),
    ),
    _Told(
        "adapter_slots",
        "Adapter slots on the device.",
        lambda stats, limits, d: {
            ("used",): stats.slots_used,
            ("pinned",): stats.slots_pinned,
            ("total",): limits.adapter_slots,
        },
        ("state",),
    ),
    _Told(
        "adapter_bytes",
        "Bytes of adapters, by tier.",
        lambda stats, limits, disk: {
            ("device",): stats.tiers.device_bytes,
            ("host",): stats.tiers.host_bytes,
            ("disk",): disk.bytes,
        },
        ("tier",),
    ),
    _one("adapters_loading", "Adapters on their way from disk to the device.", lambda stats: stats.tiers.loading),
    _Told("adapters_fetching", "Adapters on their way from the store.", lambda s, limits, disk: {(): disk.fetching}),
    _Told(
        "adapter_requests",
        "Requests by whether a tier had their adapter.",
        lambda stats, limits, disk: {
            ("device", "hit"): stats.adapter_hits,
            ("device", "miss"): stats.adapter_misses,
            ("disk", "hit"): disk.hits,
            ("disk", "miss"): disk.misses,
        },
        ("tier", "result"),
        counts=True,
    ),
    _one("adapter_loads", "Adapters that came into a slot.", lambda stats: stats.tiers.loads, counts=True),
    _one("adapter_swaps", "Adapters that left it for another.", lambda stats: stats.tiers.swaps, counts=True),
    _one("engine_steps", "Steps.", lambda stats: stats.steps, counts=True),
    _one("engine_computed_tokens", "Tokens computed, prompts' too.", lambda stats: stats.computed_tokens, counts=True),
    _one("num_preemptions", "Sequences that had to give their blocks back.", lambda s: s.preemptions, counts=True),
    _one("prefix_cache_queries", "Tokens looked for in the prefix cache.", lambda s: s.prefix_queries, counts=True),
    _one("prefix_cache_hits", "Of these, found.", lambda stats: stats.prefix_hits, counts=True),
)


class EngineCollector(Collector):
    """What the engine said last; costs nothing until somebody asks. Counts begin again with every engine."""

    def __init__(self) -> None:
        self.source: Source | None = None

    def collect(self) -> Iterator[Metric]:
        """Every family, without samples while there is no engine."""
        source = self.source
        for told in _TOLD:
            kind = CounterMetricFamily if told.counts else GaugeMetricFamily
            family = kind(f"{PREFIX}_{told.name}", told.text, labels=told.labels)
            values = told.read(source.stats, source.limits, source.disk) if source is not None else {}
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family
