"""Times at which requests are sent: in an open loop independent of the answers, in a closed one when an answer ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from loraplex.loadtest.decoding import Decoded, NotNegative, Positive

Seconds: TypeAlias = npt.NDArray[np.float64]

# Maximum number of clients of a closed loop: each is a task with an open call, which takes 30 KiB, so these take 3 GiB.
CLIENTS = 100_000
ClientCount = Annotated[int, msgspec.Meta(ge=1, le=CLIENTS)]
# Number of gaps that are drawn at once.
_BLOCK = 4096


@dataclass(frozen=True)
class Extent:
    """The length of a run: `requests` or `duration_s`, after a warm-up that is sent but not reported.

    The warm-up is in the same unit as the rest, requests or seconds. A ramp or a trace ends by itself and has neither.
    """

    requests: int | None = None
    duration_s: float | None = None
    warm_up_requests: int = 0
    warm_up_s: float = 0.0

    @property
    def total_requests(self) -> int | None:
        """Return the number of requests with the warm-up."""
        return None if self.requests is None else self.requests + self.warm_up_requests

    @property
    def total_s(self) -> float | None:
        """Return the duration with the warm-up, in seconds."""
        return None if self.duration_s is None else self.duration_s + self.warm_up_s


class Closed(Decoded, frozen=True, tag="closed"):
    """A closed loop: each of `concurrency` clients sends its next request as soon as its last one has ended."""

    concurrency: ClientCount


class Constant(Decoded, frozen=True, tag="constant"):
    """Evenly spaced requests."""

    rate_per_s: Positive


class Poisson(Decoded, frozen=True, tag="poisson"):
    """A Poisson process."""

    rate_per_s: Positive


class Gamma(Decoded, frozen=True, tag="gamma"):
    """Gaps with a Gamma distribution; `cv` is their coefficient of variation, and above 1 burstier than Poisson."""

    rate_per_s: Positive
    cv: Positive


class Stage(Decoded, frozen=True):
    """A Poisson process whose rate changes evenly from one value to the other in `for_s` seconds."""

    from_per_s: NotNegative
    to_per_s: NotNegative
    for_s: Positive

    def __post_init__(self) -> None:
        if self.from_per_s == self.to_per_s == 0:
            raise ValueError("to_per_s: a stage needs a rate greater than 0 at one end")


class Ramp(Decoded, frozen=True, tag="ramp"):
    """Stages in succession."""

    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1)]


@dataclass(frozen=True)
class Replay:
    """Requests at the times of a trace."""

    at_s: tuple[float, ...]


Open: TypeAlias = Poisson | Constant | Gamma | Ramp | Replay
Arrivals: TypeAlias = Open | Closed


def arrival_times(arrivals: Open, extent: Extent, seed: int) -> Seconds:
    """Return the time of each request in seconds from the start, ascending; the warm-up comes first."""
    rng = np.random.default_rng([seed, 1])
    match arrivals:
        case Replay(at_s):
            return np.asarray(at_s, dtype=np.float64)
        case Ramp(stages):
            return _ramp(stages, rng)
        case Constant(rate_per_s):
            # The first is at 0. Multiplying keeps rounding errors from adding up.
            if extent.total_requests is not None:
                return np.arange(extent.total_requests) / rate_per_s
            times = np.arange(math.ceil((extent.total_s or 0) * rate_per_s) + 1) / rate_per_s
            return times[times < (extent.total_s or 0)]
        case Poisson(rate_per_s):
            return _gamma(rate_per_s, 1.0, extent, rng)
        case Gamma(rate_per_s, cv):
            return _gamma(rate_per_s, cv, extent, rng)


def _gamma(rate_per_s: float, cv: float, extent: Extent, rng: np.random.Generator) -> Seconds:
    """Draw gaps of mean shape * scale = 1 / rate and deviation sqrt(shape) * scale = cv / rate."""
    shape = cv**-2
    return _renewal(lambda count: rng.gamma(shape, 1 / (rate_per_s * shape), count), extent)


def _renewal(gaps: Callable[[int], Seconds], extent: Extent) -> Seconds:
    """Add up independent gaps to the end of the extent, which does not change the times before it."""
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
    """Draw an inhomogeneous Poisson process by inversion (Cinlar): unit-rate arrivals, inverse expected count."""
    times, begin_s, missing = [], 0.0, float(rng.exponential())
    for stage in stages:
        slope = (stage.to_per_s - stage.from_per_s) / stage.for_s
        expected = (stage.from_per_s + stage.to_per_s) / 2 * stage.for_s
        while missing < expected:
            # from * t + slope * t^2 / 2 = missing, in the form that also holds for slope 0
            root = math.sqrt(stage.from_per_s**2 + 2 * slope * missing)
            times.append(begin_s + min(stage.for_s, 2 * missing / (stage.from_per_s + root)))
            missing += float(rng.exponential())
        missing -= expected
        begin_s += stage.for_s
    return np.asarray(times, dtype=np.float64)
