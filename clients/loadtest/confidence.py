"""Confidence intervals (95%) of percentiles, rates and shares, which tell a change from noise.

The standard errors are those of the means of consecutive blocks: requests that run at the same time are slow together,
so that the number of requests alone would make the intervals too narrow.
"""

from __future__ import annotations

import math

import numpy as np

from clients.loadtest.samples import Column, Mask

# Lower and upper bound; None where the values are too few to tell.
Interval = tuple[float | None, float | None]

# Maximum number of blocks, and Student's t of 95% for as many.
_BLOCKS = 20
_T = 2.093

UNKNOWN: Interval = (None, None)


def percentile_interval(values: Column, share: float) -> Interval:
    """Return the interval of the percentile below which a `share` of the values is, by Woodruff's method (1952).

    The interval of the share of values up to the percentile gives the ranks of its bounds. For example p99 has an
    upper bound from about 440 values on.
    """
    count = len(values)
    if count < 2:
        return UNKNOWN
    ordered = np.sort(values)
    below = values <= ordered[max(1, math.ceil(share * count)) - 1]
    error = max(_error_of_blocks(below), math.sqrt(share * (1 - share) / count))
    low, high = math.floor(count * (share - _T * error)), math.ceil(count * (share + _T * error))
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
