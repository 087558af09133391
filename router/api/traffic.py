"""Totals of what a router has served since its start, read from its own metrics: for `loraplex top`."""

from __future__ import annotations

import time
from collections import defaultdict

from loraplex.cluster.v1 import cluster_pb2 as pb
from prometheus_client import Counter, Histogram

from router.metrics import RouterMetrics

Whose = tuple[str, str]


class Traffic:
    """Sums one router's metrics over their labels."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._began = time.monotonic()

    def response(self, open_requests: int) -> pb.GetTrafficResponse:
        """Return the totals now."""
        metrics = self._metrics
        return pb.GetTrafficResponse(
            uptime=time.monotonic() - self._began,
            open=open_requests,
            requests={labels["code"]: int(value) for labels, value in _values(metrics.requests)},
            prompt_tokens=_total(metrics.prompt_tokens),
            completion_tokens=_total(metrics.generation_tokens),
            time_to_first_token=_distribution(metrics.ttft),
            inter_token_latency=_distribution(metrics.itl),
            queue_time=_distribution(metrics.queue_time),
            redispatches=_total(metrics.redispatches),
            workers_lost=_total(metrics.workers_lost),
            adapters=self._adapters(),
        )

    def _adapters(self) -> list[pb.AdapterTraffic]:
        metrics = self._metrics
        found: dict[Whose, pb.AdapterTraffic] = {}
        for labels, value in _values(metrics.tenant_requests):
            whose = (labels["tenant"], labels["adapter"])
            found[whose] = pb.AdapterTraffic(tenant=whose[0], adapter=whose[1], requests=int(value))
        for name, counter in (
            ("prompt_tokens", metrics.tenant_prompt_tokens),
            ("completion_tokens", metrics.tenant_generation_tokens),
            ("time_to_first_token", metrics.tenant_ttft),
        ):
            for labels, value in _values(counter):
                # An adapter that was counted after the requests were read comes with the next answer.
                traffic = found.get((labels["tenant"], labels["adapter"]))
                if traffic is not None:
                    setattr(traffic, name, value if name == "time_to_first_token" else int(value))
        return list(found.values())


def _values(counter: Counter) -> list[tuple[dict[str, str], float]]:
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return [(sample.labels, sample.value) for sample in samples if sample.name.endswith("_total")]


def _total(counter: Counter) -> int:
    return int(sum(value for _, value in _values(counter)))


def _distribution(histogram: Histogram) -> pb.Distribution:
    """Sum a histogram over its labels. Prometheus's buckets are cumulative; the last has no bound."""
    upto: dict[float, float] = defaultdict(float)
    total = 0.0
    for metric in histogram.collect():
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                upto[float(sample.labels["le"])] += sample.value
            elif sample.name.endswith("_sum"):
                total += sample.value
    bounds = sorted(upto)
    counts = [int(upto[bound] - (upto[bounds[at - 1]] if at else 0.0)) for at, bound in enumerate(bounds)]
    return pb.Distribution(bounds=bounds[:-1], counts=counts, sum=total)
