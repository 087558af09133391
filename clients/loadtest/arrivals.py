"""When requests are to be sent. Open loop: at times that do not depend on the answers. Closed: when one has ended."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Seconds: TypeAlias = npt.NDArray[np.float64]

_BLOCK = 4096


@dataclass(frozen=True)
class Extent:
    """How much is sent: `requests` or `duration_s`, after a warm-up that is sent too but not reported.

    The warm-up is counted as the rest is: requests or seconds. A ramp or a trace has an end of its own, and neither.
    """

    requests: int | None = None
    duration_s: float | None = None
    warm_up_requests: int = 0
    warm_up_s: float = 0.0

    @property
    def total_requests(self) -> int | None:
        """With the warm-up."""
        return None if self.requests is None else self.requests + self.warm_up_requests

    @property
    def total_s(self) -> float | None:
        """With the warm-up."""
        return None if self.duration_s is None else self.duration_s + self.warm_up_s


@dataclass(frozen=True)
class Closed:
    """Each of `concurrency` clients sends its next request as soon as its last one has ended."""

    concurrency: int


@dataclass(frozen=True)
class Constant:
    """Evenly spaced."""

    rate_per_s: float


@dataclass(frozen=True)
class Gamma:
    """Gaps of a Gamma distribution with coefficient of variation `cv`; 1 is a Poisson process, more is burstier."""

    rate_per_s: float
    cv: float = 1.0


@dataclass(frozen=True)
class Stage:
    """A Poisson process whose rate goes evenly from one to the other during `for_s` seconds."""

    from_per_s: float
    to_per_s: float
    for_s: float


@dataclass(frozen=True)
class Ramp:
    """Stages, one after the other."""

    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Replay:
    """The times of a trace."""

    at_s: tuple[float, ...]


Open: TypeAlias = Constant | Gamma | Ramp | Replay
Arrivals: TypeAlias = Open | Closed


def arrival_times(arrivals: Open, extent: Extent, seed: int) -> Seconds:
    """When each request is to be sent, in seconds from the start, ascending; the warm-up's come first."""
    rng = np.random.default_rng([seed, 1])
    match arrivals:
        case Replay(at_s):
            return np.asarray(at_s, dtype=np.float64)
        case Ramp(stages):
            return _ramp(stages, rng)
        case Constant(rate_per_s):
            # The first at 0; by multiplication, so that no error adds up.
            if extent.total_requests is not None:
                return np.arange(extent.total_requests) / rate_per_s
            times = np.arange(math.ceil((extent.total_s or 0) * rate_per_s) + 1) / rate_per_s
            return times[times < (extent.total_s or 0)]
        case Gamma(rate_per_s, cv):
            # Mean shape * scale = 1 / rate, deviation sqrt(shape) * scale = cv / rate.
            shape = cv**-2
            return _renewal(lambda count: rng.gamma(shape, 1 / (rate_per_s * shape), count), extent)


def _renewal(gaps: Callable[[int], Seconds], extent: Extent) -> Seconds:
    """The running sum of independent gaps, as far as the extent goes. The same seed gives the same times for any."""
    blocks, count, last = [], 0, 0.0
    while True:
        block = last + np.cumsum(gaps(_BLOCK))
        blocks.append(block)
        count, last = count + _BLOCK, float(block[-1])
        if extent.total_requests is not None:
            if count >= extent.total_requests:
                return np.concatenate(blocks)[: extent.total_requests]
        elif last >= (extent.total_s or 0):
            times = np.concatenate(blocks)
            return times[times < (extent.total_s or 0)]


def _ramp(stages: tuple[Stage, ...], rng: np.random.Generator) -> Seconds:
    """An inhomogeneous Poisson process by inversion (Cinlar): unit-rate arrivals through the inverse expected count."""
    found, begin_s, missing = [], 0.0, float(rng.exponential())
    for stage in stages:
        slope = (stage.to_per_s - stage.from_per_s) / stage.for_s
        expected = (stage.from_per_s + stage.to_per_s) / 2 * stage.for_s
        while missing < expected:
            # from * t + slope * t^2 / 2 = missing, in the form that also holds for slope 0
            root = math.sqrt(stage.from_per_s**2 + 2 * slope * missing)
            found.append(begin_s + min(stage.for_s, 2 * missing / (stage.from_per_s + root)))
            missing += float(rng.exponential())
        missing -= expected
        begin_s += stage.for_s
    return np.asarray(found, dtype=np.float64)
