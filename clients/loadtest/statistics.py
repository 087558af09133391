"""Figures computed from samples. Percentiles are exact, by nearest rank: each is a time that was measured.

The warm-up counts for nothing. ttft and itl are of all requests that got tokens, latency and tpot of those that ended
well. In an open loop ttft and latency begin when the request was due, which corrects for coordinated omission (Tene,
"How NOT to Measure Latency"); `*_from_send` are the uncorrected times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clients.loadtest.arrivals import Closed
from clients.loadtest.confidence import Interval, percentile_interval, rate_interval, share_interval
from clients.loadtest.distribution import PERCENTILES, histogram, spread
from clients.loadtest.plan import Plan
from clients.loadtest.samples import LEFT, OK, Column, Mask, Samples
from clients.loadtest.timeline import streams, timeline

# Threshold in seconds of a cold adapter: one on the device costs microseconds, one that must be loaded more.
COLD_S = 0.001


@dataclass(frozen=True)
class Measured:
    """The requests of a run after its warm-up, and their times."""

    samples: Samples
    begin_s: float
    end_s: float

    @property
    def elapsed_s(self) -> float:
        """Return the seconds from the first request's due time to the last request's end."""
        return max(self.end_s - self.begin_s, 1e-9)

    def times(self) -> dict[str, Column]:
        """Return the samples of each time, in seconds."""
        samples = self.samples
        begun, whole = samples.column("messages") > 0, samples.with_status(OK)
        several = whole & (samples.column("tokens") > 1)
        intended, sent = samples.column("intended_s"), samples.column("sent_s")
        first, last, end = (samples.column(name) for name in ("first_s", "last_s", "end_s"))
        # HTTP servers do not tell these.
        queue, adapter = samples.column("queue_s"), samples.column("adapter_s")
        return {
            "ttft": (first - intended)[begun],
            "itl": samples.gaps,
            "tpot": ((last - first) / np.maximum(samples.column("tokens") - 1, 1))[several],
            "latency": (end - intended)[whole],
            "ttft_from_send": (first - sent)[begun],
            "latency_from_send": (end - sent)[whole],
            "queue": queue[whole & ~np.isnan(queue)],
            "adapter": adapter[whole & (samples.column("adapter") >= 0) & ~np.isnan(adapter)],
        }

    def good(self, plan: Plan) -> Mask:
        """Return a mask of the requests that ended well and met every SLO of their tenant."""
        samples = self.samples
        first, intended = samples.column("first_s"), samples.column("intended_s")
        of_request = {
            "ttft": first - intended,
            "itl": samples.column("longest_gap_s"),
            "tpot": (samples.column("last_s") - first) / np.maximum(samples.column("tokens") - 1, 1),
            "latency": samples.column("end_s") - intended,
        }
        good = samples.with_status(OK)
        for number, tenant in enumerate(plan.tenants):
            others = samples.column("tenant") != number
            for slo in tenant.slos:
                good &= others | (of_request[slo.metric] <= slo.limit_s)
        return good


def measured(plan: Plan, samples: Samples) -> Measured:
    """Return a run without its warm-up."""
    extent = plan.extent
    warm = (samples.column("index") < extent.warm_up_requests) | (samples.column("intended_s") < extent.warm_up_s)
    rest = samples.where(~warm)
    if not len(rest):
        return Measured(rest, 0.0, 0.0)
    return Measured(rest, float(rest.column("intended_s").min()), float(rest.column("end_s").max()))


def figures(plan: Plan, run: Measured) -> dict[str, Any]:
    """Compute rates per second of the elapsed time, shares of the requests, and sums."""
    samples, count = run.samples, len(run.samples)
    ok, left = samples.with_status(OK), samples.with_status(LEFT)
    errors, good = count - int(ok.sum()) - int(left.sum()), int(run.good(plan).sum())
    with_adapter = ok & (samples.column("adapter") >= 0)
    cold = with_adapter & (samples.column("adapter_s") > COLD_S)
    tokens, messages = samples.column("tokens").sum(), samples.column("messages").sum()
    return {
        "elapsed_s": run.elapsed_s if count else 0.0,
        "requests": count,
        "ok": int(ok.sum()),
        "cancelled": int(left.sum()),
        "errors": errors,
        "error_share": _ratio(errors, count),
        "requests_per_s": int(ok.sum()) / run.elapsed_s,
        "tokens_per_s": float(tokens) / run.elapsed_s,
        "texts": int(samples.column("texts").sum()),
        "texts_per_s": float(samples.column("texts").sum()) / run.elapsed_s,
        "goodput_per_s": good / run.elapsed_s,
        "goodput_share": _ratio(good, count),
        "cold": int(cold.sum()),
        "cold_share": _ratio(int(cold.sum()), int(with_adapter.sum())),
        "tokens": int(tokens),
        "tokens_per_message": _ratio(float(tokens), float(messages)),
        "prompt_tokens": int(samples.column("prompt_tokens").sum()),
        "cached_tokens": int(samples.column("cached_tokens").sum()),
        "continuations": int(samples.column("continuations").sum()),
    }


def intervals(plan: Plan, run: Measured) -> dict[str, Interval]:
    """Compute the confidence intervals of the values that `compare` judges."""
    samples, times = run.samples, run.times()
    ok, left, cold = samples.with_status(OK), samples.with_status(LEFT), samples.column("adapter_s") > COLD_S
    ended: dict[str, Column | Mask] = {
        "requests_per_s": ok,
        "tokens_per_s": samples.column("tokens"),
        "texts_per_s": samples.column("texts"),
        "goodput_per_s": run.good(plan),
    }
    return {
        **{
            f"{metric}.{name}": percentile_interval(times[metric], PERCENTILES[name] / 1000)
            for metric in ("ttft", "itl", "tpot", "latency")
            for name in ("p50", "p90", "p99")
        },
        **{
            name: rate_interval(samples.column("end_s"), weights, run.begin_s, run.end_s)
            for name, weights in ended.items()
        },
        "error_share": share_interval(~(ok | left)),
        "cold_share": share_interval(cold[ok & (samples.column("adapter") >= 0)]),
    }


def statuses(samples: Samples) -> dict[str, int]:
    """Count the requests by status, the most frequent first."""
    numbers, counts = np.unique(samples.column("status").astype(np.int64), return_counts=True)
    found = {samples.statuses[number]: int(count) for number, count in zip(numbers, counts, strict=True)}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def messages(samples: Samples) -> dict[str, str]:
    """Return the message of the first error of each status."""
    return {status: samples.first_errors[status][1] for status in statuses(samples) if status in samples.first_errors}


def by_tenant(plan: Plan, run: Measured) -> list[dict[str, Any]]:
    """Compute each tenant's figures and times, and its shares of requests and tokens."""
    tenant, tokens = run.samples.column("tenant"), run.samples.column("tokens")
    rows = []
    for number, owner in enumerate(plan.tenants):
        mask = tenant == number
        part = Measured(run.samples.where(mask), run.begin_s, run.end_s)
        rows.append(
            {
                "tenant": owner.name,
                "request_share": _ratio(int(mask.sum()), len(run.samples)),
                "token_share": _ratio(float(tokens[mask].sum()), float(tokens.sum())),
                "figures": figures(plan, part),
                "times": {name: spread(values) for name, values in part.times().items()},
                "statuses": statuses(part.samples),
            }
        )
    return rows


def by_adapter(adapters: list[tuple[str, str]], plan: Plan, run: Measured) -> list[dict[str, Any]]:
    """Compute figures of each (tenant, adapter), the most requested first; the base model is adapter None."""
    samples = run.samples
    order = np.argsort(samples.column("adapter"), kind="stable")
    numbers, starts = np.unique(samples.column("adapter")[order], return_index=True)
    rows = []
    for number, members in zip(numbers.astype(np.int64), np.split(order, starts[1:]), strict=True):
        part = Measured(samples.take(members), run.begin_s, run.end_s)
        tenant, adapter = adapters[number] if number >= 0 else (None, None)
        sums = figures(plan, part)
        times = part.times()
        rows.append(
            {
                "tenant": tenant,
                "adapter": adapter,
                **{name: sums[name] for name in ("requests", "ok", "errors", "cold", "tokens")},
                "ttft": spread(times["ttft"]),
                "itl": spread(times["itl"]),
                "latency": spread(times["latency"]),
            }
        )
    return sorted(rows, key=lambda row: -row["requests"])


def loop_kind(plan: Plan) -> str:
    """Return `open` or `closed`."""
    return "closed" if isinstance(plan.arrivals, Closed) else "open"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def summarise(plan: Plan, samples: Samples, adapters: list[tuple[str, str]]) -> Mapping[str, Any]:
    """Compute all figures of a run's requests, as JSON values."""
    run = measured(plan, samples)
    times = run.times()
    return {
        "loop": loop_kind(plan),
        "figures": figures(plan, run),
        "statuses": statuses(run.samples),
        "messages": messages(run.samples),
        "times": {name: spread(values) for name, values in times.items()},
        "intervals": intervals(plan, run),
        "histograms": {name: histogram(times[name]) for name in ("ttft", "itl", "tpot", "latency")},
        "timeline": timeline(run.samples, run.begin_s, run.end_s) if len(run.samples) else {},
        "tenants": by_tenant(plan, run),
        "adapters": by_adapter(adapters, plan, run),
        "streams": streams(run.samples, adapters, plan),
    }
