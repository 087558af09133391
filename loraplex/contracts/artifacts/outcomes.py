"""Outcomes of requests under a rollout: routers count them, the store sums them up and holds them against the rules."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Buckets of times for each factor of 10, so that a median is exact to 6%.
_BUCKETS_PER_DECADE = 20
# Bucket of the longest times, of three hours and more.
_LAST_BUCKET = 140


@dataclass(slots=True)
class Outcomes:
    """Counts of one side of a rollout. `ttft_buckets`: requests by time to the first token, see `ttft_bucket`."""

    requests: int = 0
    errors: int = 0
    refusals: int = 0
    ttft_buckets: dict[int, int] = field(default_factory=dict)

    def add(self, other: Outcomes) -> None:
        """Add another's counts."""
        self.requests += other.requests
        self.errors += other.errors
        self.refusals += other.refusals
        for bucket, count in other.ttft_buckets.items():
            self.ttft_buckets[bucket] = self.ttft_buckets.get(bucket, 0) + count

    def median_ttft_ms(self) -> float:
        """Return the upper end of the median's bucket; 0 without any."""
        rank = (sum(self.ttft_buckets.values()) + 1) // 2
        for bucket in sorted(self.ttft_buckets):
            rank -= self.ttft_buckets[bucket]
            if rank <= 0:
                return float(10 ** (bucket / _BUCKETS_PER_DECADE))
        return 0.0


def ttft_bucket(seconds: float) -> int:
    """Return the bucket k of a time: the smallest with at most 10^(k/20) ms, from 0 to 140."""
    return min(_LAST_BUCKET, math.ceil(_BUCKETS_PER_DECADE * math.log10(max(1.0, seconds * 1e3))))


@dataclass(slots=True)
class ShadowOutcomes:
    """Counts of shadow requests, as releases.proto has them. Times in seconds, log probabilities in nats.

    `requests` has the failures too, none of whose tokens are equal; times and log probabilities are of the others.
    """

    requests: int = 0
    failures: int = 0
    skipped: int = 0
    tokens: int = 0
    equal_tokens: int = 0
    logprob_difference: float = 0.0
    candidate_seconds: float = 0.0
    live_seconds: float = 0.0

    def add(self, other: ShadowOutcomes) -> None:
        """Add another's counts."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class StepOutcomes:
    """Counts of one step of a rollout: of the live revision, of the candidate, and of shadow requests."""

    live: Outcomes = field(default_factory=Outcomes)
    candidate: Outcomes = field(default_factory=Outcomes)
    shadow: ShadowOutcomes = field(default_factory=ShadowOutcomes)

    def add(self, other: StepOutcomes) -> None:
        """Add another's counts."""
        self.live.add(other.live)
        self.candidate.add(other.candidate)
        self.shadow.add(other.shadow)

    def figures(self) -> dict[str, float]:
        """Return what rules look at and histories keep, by name: counts, shares from 0 to 1, milliseconds and nats."""
        figures: dict[str, float] = {}
        for side, counts in (("live", self.live), ("candidate", self.candidate)):
            figures[f"{side}_requests"] = counts.requests
            figures[f"{side}_error_rate"] = counts.errors / counts.requests if counts.requests else 0.0
            figures[f"{side}_refusal_rate"] = counts.refusals / counts.requests if counts.requests else 0.0
            figures[f"{side}_ttft_ms"] = counts.median_ttft_ms()
        shadow = self.shadow
        if shadow.requests:
            answered = max(1, shadow.requests - shadow.failures)
            figures |= {
                "shadow_requests": shadow.requests,
                "shadow_failure_rate": shadow.failures / shadow.requests,
                "agreement": shadow.equal_tokens / shadow.tokens if shadow.tokens else 1.0,
                "logprob_difference": shadow.logprob_difference / answered,
                "shadow_ms": shadow.candidate_seconds / answered * 1e3,
                "shadowed_ms": shadow.live_seconds / answered * 1e3,
            }
        return figures
