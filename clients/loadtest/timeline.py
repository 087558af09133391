"""The course of a run: rates over time, and the first streams message by message."""

from __future__ import annotations

from typing import Any

import numpy as np

from clients.loadtest.plan import Plan
from clients.loadtest.samples import LEFT, OK, Column, Samples


def timeline(samples: Samples, begin_s: float, end_s: float, buckets: int = 120) -> dict[str, list[float]]:
    """Compute, for equal spans of time, rates of requests and messages, running requests, and the median ttft."""
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
        "ttft_p50_s": [float(np.median(values)) if len(values) else 0.0 for values in medians],
    }


def message_times(samples: Samples) -> Column:
    """Return the arrival time of each message with tokens, since the run's start, request by request."""
    counts = samples.gap_counts()
    begun = samples.column("messages") > 0
    running = np.cumsum(samples.gaps)
    before = np.concatenate([[0.0], running])[np.cumsum(counts) - counts]
    later = np.repeat(samples.column("first_s"), counts) + running - np.repeat(before, counts)
    return np.concatenate([samples.column("first_s")[begun], later])


def streams(samples: Samples, adapters: list[tuple[str, str]], plan: Plan, limit: int = 32) -> list[dict[str, Any]]:
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
