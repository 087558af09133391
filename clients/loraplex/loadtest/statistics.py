"""Figures computed from samples. Percentiles are exact, by nearest rank: each is a time that was measured.

The warm-up counts for nothing. ttft and itl are of all requests that got tokens, latency and tpot of those that ended
well. In an open loop ttft and latency begin when the request was due, which corrects for coordinated omission (Tene,
"How NOT to Measure Latency"); `*_from_send` are the uncorrected times.

Confidence intervals (95%) tell a change from noise. Their standard errors are those of the means of consecutive blocks:
requests that run at the same time are slow together, so that their number alone would make the intervals too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from loraplex.loadtest.arrivals import Closed
from loraplex.loadtest.plan import LoadPlan
from loraplex.loadtest.samples import LEFT, OK, Column, Mask, Samples

# Bounds of the histograms: 10 us to 1,000 s, eight to each power of ten.
BOUNDS_S = np.power(10.0, np.arange(-40, 25) / 8)

# Percentiles of each time, in thousandths.
PERCENTILES = {"p50": 500, "p90": 900, "p95": 950, "p99": 990, "p99.9": 999}
# Lower and upper bound; None where the values are too few to tell.
Interval = tuple[float | None, float | None]

# Maximum number of blocks, and Student's t of 95% for as many.
_BLOCKS = 20
_T = 2.093

UNKNOWN: Interval = (None, None)
# Threshold in seconds of a cold adapter: one on the device costs microseconds, one that must be loaded more.
COLD_S = 0.001


def spread(values: Column) -> dict[str, float | None]:
    """Compute count, mean, extremes and percentiles; None without values."""
    count = len(values)
    figures_by_name: dict[str, float | None] = {"count": count}
    if not count:
        return figures_by_name | dict.fromkeys(("mean", "min", "max", *PERCENTILES))
    figures_by_name |= {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
    ordered = np.sort(values)
    # In thousandths, because rounding would make the rank of p99.9 of 1,000 values 1,000 instead of 999.
    ranks = {name: -(-thousandths * count // 1000) for name, thousandths in PERCENTILES.items()}
    return figures_by_name | {name: float(ordered[rank - 1]) for name, rank in ranks.items()}


def histogram(values: Column) -> dict[str, list[float]]:
    """Count values between `bounds_s[i]` and `bounds_s[i + 1]`; the outermost buckets include all beyond them."""
    counts, _ = np.histogram(np.clip(values, BOUNDS_S[0], BOUNDS_S[-1]), BOUNDS_S)
    filled = np.flatnonzero(counts)
    if not len(filled):
        return {"bounds_s": [], "counts": []}
    first, last = int(filled[0]), int(filled[-1])
    return {"bounds_s": BOUNDS_S[first : last + 2].tolist(), "counts": counts[first : last + 1].tolist()}


def percentile_interval(values: Column, fraction: float) -> Interval:
    """Return the interval of the percentile below which a `share` of the values is, by Woodruff's method (1952).

    The interval of the share of values up to the percentile gives the ranks of its bounds. For example p99 has an
    upper bound from about 440 values on.
    """
    count = len(values)
    if count < 2:
        return UNKNOWN
    ordered = np.sort(values)
    below = values <= ordered[max(1, math.ceil(fraction * count)) - 1]
    error = max(_error_of_blocks(below), math.sqrt(fraction * (1 - fraction) / count))
    low, high = math.floor(count * (fraction - _T * error)), math.ceil(count * (fraction + _T * error))
    return (float(ordered[low - 1]) if low >= 1 else None, float(ordered[high - 1]) if high <= count else None)


def rate_interval(ends_s: Column, weights: Column | Mask, begin_s: float, end_s: float) -> Interval:
    """Return the interval of the sum of `weights` in a second, from the rates in equal spans of time."""
    if len(ends_s) < 2 or end_s <= begin_s:
        return UNKNOWN
    blocks = min(_BLOCKS, len(ends_s))
    sums, _ = np.histogram(ends_s, blocks, (begin_s, end_s), weights=weights.astype(np.float64))
    rates = sums * blocks / (end_s - begin_s)
    reach = _T * float(rates.std(ddof=1)) / math.sqrt(blocks)
    return max(0.0, float(rates.mean()) - reach), float(rates.mean()) + reach


def share_interval(mask: Mask) -> Interval:
    """Return the interval of the share of true values (Agresti and Coull, 1998)."""
    count = len(mask)
    if not count:
        return UNKNOWN
    middle = (float(mask.sum()) + 2) / (count + 4)
    error = max(_error_of_blocks(mask), math.sqrt(middle * (1 - middle) / (count + 4)))
    return max(0.0, middle - _T * error), min(1.0, middle + _T * error)


def _error_of_blocks(mask: Mask) -> float:
    """Return the standard error of the mean, from the means of consecutive blocks."""
    if len(mask) < 2:
        return 0.0
    means = [block.mean() for block in np.array_split(mask, min(_BLOCKS, len(mask)))]
    return float(np.std(means, ddof=1)) / math.sqrt(len(means))


def timeline(samples: Samples, begin_s: float, end_s: float, buckets: int = 120) -> dict[str, list[Any]]:
    """Compute, for equal spans of time, rates of requests and messages, running requests, and the median ttft.

    The ttft is None in spans in which no answer began.
    """
    edges = np.linspace(begin_s, end_s, min(buckets, max(10, len(samples))) + 1)
    span_s = max(float(edges[1] - edges[0]), 1e-9)
    sent, end = samples.column("sent_s"), samples.column("end_s")
    failed = ~(samples.with_status(OK) | samples.with_status(LEFT))
    bucket = np.clip(np.searchsorted(edges, samples.column("first_s"), side="right") - 1, 0, len(edges) - 2)
    ttft, begun = samples.column("first_s") - samples.column("intended_s"), samples.column("messages") > 0
    medians = [ttft[begun & (bucket == number)] for number in range(len(edges) - 1)]
    return {
        "at_s": (edges[1:] - begin_s).tolist(),
        "sent_per_s": (np.histogram(sent, edges)[0] / span_s).tolist(),
        "ended_per_s": (np.histogram(end, edges)[0] / span_s).tolist(),
        "errors_per_s": (np.histogram(end[failed], edges)[0] / span_s).tolist(),
        "messages_per_s": (np.histogram(message_times(samples), edges)[0] / span_s).tolist(),
        "running": [int(((sent <= edge) & (end > edge)).sum()) for edge in edges[1:]],
        "ttft_p50_s": [float(np.median(values)) if len(values) else None for values in medians],
    }


def message_times(samples: Samples) -> Column:
    """Return the arrival time of each message with tokens, since the run's start, request by request."""
    counts = samples.gap_counts()
    begun = samples.column("messages") > 0
    running = np.cumsum(samples.gaps)
    before = np.concatenate([[0.0], running])[np.cumsum(counts) - counts]
    later = np.repeat(samples.column("first_s"), counts) + running - np.repeat(before, counts)
    return np.concatenate([samples.column("first_s")[begun], later])


def streams(samples: Samples, adapters: list[tuple[str, str]], plan: LoadPlan, limit: int = 32) -> list[dict[str, Any]]:
    """Return the message times of the first requests, for a plot of concurrent streams."""
    ends = np.cumsum(samples.gap_counts())
    rows = []
    for at in range(min(limit, len(samples))):
        row = {
            name: float(samples.column(name)[at]) for name in ("intended_s", "first_s", "end_s", "adapter", "tenant")
        }
        gaps = samples.gaps[ends[at] - samples.gap_counts()[at] : ends[at]][:2000]
        begun = samples.column("messages")[at] > 0
        times = row["first_s"] + np.concatenate([[0.0], np.cumsum(gaps)]) if begun else np.empty(0)
        rows.append(
            {
                "index": int(samples.column("index")[at]),
                "tenant": plan.tenants[int(row["tenant"])].name,
                "adapter": adapters[int(row["adapter"])][1] if row["adapter"] >= 0 else None,
                "status": samples.statuses[int(samples.column("status")[at])],
                "intended_s": row["intended_s"],
                "end_s": row["end_s"],
                "messages_s": times.tolist(),
            }
        )
    return rows


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

    def good(self, plan: LoadPlan) -> Mask:
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


def measured(plan: LoadPlan, samples: Samples) -> Measured:
    """Return a run without its warm-up."""
    extent = plan.extent
    warm = (samples.column("index") < extent.warm_up_requests) | (samples.column("intended_s") < extent.warm_up_s)
    rest = samples.where(~warm)
    if not len(rest):
        return Measured(rest, 0.0, 0.0)
    return Measured(rest, float(rest.column("intended_s").min()), float(rest.column("end_s").max()))


def figures(plan: LoadPlan, run: Measured) -> dict[str, Any]:
    """Compute rates per second of the elapsed time, shares of the requests, and sums."""
    samples, count = run.samples, len(run.samples)
    ok, cancelled = samples.with_status(OK), samples.with_status(LEFT)
    errors, good = count - int(ok.sum()) - int(cancelled.sum()), int(run.good(plan).sum())
    with_adapter = ok & (samples.column("adapter") >= 0)
    cold = with_adapter & (samples.column("adapter_s") > COLD_S)
    tokens, messages = samples.column("tokens").sum(), samples.column("messages").sum()
    return {
        "elapsed_s": run.elapsed_s if count else 0.0,
        "requests": count,
        "ok": int(ok.sum()),
        "cancelled": int(cancelled.sum()),
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


def intervals(plan: LoadPlan, run: Measured) -> dict[str, Interval]:
    """Compute the confidence intervals of the values that `compare` judges."""
    samples, times = run.samples, run.times()
    ok, cancelled, cold = samples.with_status(OK), samples.with_status(LEFT), samples.column("adapter_s") > COLD_S
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
        "error_share": share_interval(~(ok | cancelled)),
        "cold_share": share_interval(cold[ok & (samples.column("adapter") >= 0)]),
    }


def statuses(samples: Samples) -> dict[str, int]:
    """Count the requests by status, the most frequent first."""
    numbers, counts = np.unique(samples.column("status").astype(np.int64), return_counts=True)
    by_status = {samples.statuses[number]: int(count) for number, count in zip(numbers, counts, strict=True)}
    return dict(sorted(by_status.items(), key=lambda item: -item[1]))


def messages(samples: Samples) -> dict[str, str]:
    """Return the message of the first error of each status."""
    return {status: samples.first_errors[status][1] for status in statuses(samples) if status in samples.first_errors}


def by_tenant(plan: LoadPlan, run: Measured) -> list[dict[str, Any]]:
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


def by_adapter(adapters: list[tuple[str, str]], plan: LoadPlan, run: Measured) -> list[dict[str, Any]]:
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


def loop_kind(plan: LoadPlan) -> str:
    """Return `open` or `closed`."""
    return "closed" if isinstance(plan.arrivals, Closed) else "open"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def summarise(plan: LoadPlan, samples: Samples, adapters: list[tuple[str, str]]) -> Mapping[str, Any]:
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
