"""The distribution of a time: its percentiles and its histogram."""

from __future__ import annotations

import numpy as np

from clients.loadtest.samples import Column

# Bounds of the histograms: 10 us to 1,000 s, eight to each power of ten.
BOUNDS_S = np.power(10.0, np.arange(-40, 25) / 8)

# Percentiles of each time, in thousandths.
PERCENTILES = {"p50": 500, "p90": 900, "p95": 950, "p99": 990, "p99.9": 999}


def spread(values: Column) -> dict[str, float | None]:
    """Compute count, mean, extremes and percentiles; None without values."""
    count = len(values)
    found: dict[str, float | None] = {"count": count}
    if not count:
        return found | dict.fromkeys(("mean", "min", "max", *PERCENTILES))
    found |= {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
    ordered = np.sort(values)
    # In thousandths, because rounding would make the rank of p99.9 of 1,000 values 1,000 instead of 999.
    ranks = {name: -(-thousandths * count // 1000) for name, thousandths in PERCENTILES.items()}
    return found | {name: float(ordered[rank - 1]) for name, rank in ranks.items()}


def histogram(values: Column) -> dict[str, list[float]]:
    """Count values between `bounds_s[i]` and `bounds_s[i + 1]`; the outermost buckets include all beyond them."""
    counts, _ = np.histogram(np.clip(values, BOUNDS_S[0], BOUNDS_S[-1]), BOUNDS_S)
    filled = np.flatnonzero(counts)
    if not len(filled):
        return {"bounds_s": [], "counts": []}
    first, last = int(filled[0]), int(filled[-1])
    return {"bounds_s": BOUNDS_S[first : last + 2].tolist(), "counts": counts[first : last + 1].tolist()}
