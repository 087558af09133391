"""Lengths of prompts and answers in tokens: fixed, uniform, log-normal, or drawn from a list."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from clients.loadtest.decoding import Decoded, Positive, PositiveInt

Whole: TypeAlias = npt.NDArray[np.int64]


class Lengths(Protocol):
    """A distribution of numbers of tokens, each at least 1; as a string in words, for reports."""

    def draw(self, rng: np.random.Generator, count: int) -> Whole:
        """Draw `count` lengths."""
        ...


class Fixed(Decoded, frozen=True, tag="fixed"):
    """A constant length for every request."""

    tokens: PositiveInt

    def __str__(self) -> str:
        return str(self.tokens)

    def draw(self, rng: np.random.Generator, count: int) -> Whole:
        """See Lengths."""
        return np.full(count, self.tokens, dtype=np.int64)


class Uniform(Decoded, frozen=True, tag="uniform"):
    """A uniform distribution from `low` to `high`, both included."""

    low: PositiveInt
    high: PositiveInt

    def __post_init__(self) -> None:
        check_bounds(self.low, self.high)

    def __str__(self) -> str:
        return f"uniform, from {self.low} to {self.high}"

    def draw(self, rng: np.random.Generator, count: int) -> Whole:
        """See Lengths."""
        return rng.integers(self.low, self.high + 1, count)


class LogNormal(Decoded, frozen=True, tag="log_normal"):
    """A log-normal distribution with deviation `sigma` of the logarithm, clipped to `low` and `high`."""

    median: Positive
    sigma: Positive
    high: PositiveInt
    low: PositiveInt = 1

    def __post_init__(self) -> None:
        check_bounds(self.low, self.high)

    def __str__(self) -> str:
        return f"log-normal, median {self.median:g}, sigma {self.sigma:g}, from {self.low} to {self.high}"

    def draw(self, rng: np.random.Generator, count: int) -> Whole:
        """See Lengths."""
        drawn = np.rint(rng.lognormal(math.log(self.median), self.sigma, count))
        return np.clip(drawn, self.low, self.high).astype(np.int64)


@dataclass(frozen=True)
class Listed:
    """A uniform choice from `values`: a length listed twice comes twice as often."""

    values: tuple[int, ...]

    def __str__(self) -> str:
        digest = hashlib.sha256(repr(sorted(self.values)).encode()).hexdigest()[:8]
        bounds = f"from {min(self.values)} to {max(self.values)}"
        return f"drawn from {len(self.values)} values, {bounds}, with the digest {digest}"

    def draw(self, rng: np.random.Generator, count: int) -> Whole:
        """See Lengths."""
        return np.asarray(self.values, dtype=np.int64)[rng.integers(0, len(self.values), count)]


def check_bounds(low: int, high: int) -> None:
    """Check that lengths from `low` to `high` exist. Raises ValueError."""
    if high < low:
        raise ValueError(f"high: {high} must be at least {low}")
