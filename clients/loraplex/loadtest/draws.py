"""Draws of requests: lengths of prompts and answers in tokens, and adapters."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from loraplex.loadtest.decoding import Decoded, NotNegative, PlanError, Positive, PositiveInt, convert, read_lines

Whole: TypeAlias = npt.NDArray[np.int64]
# The name in lists of adapters for requests to the plain base model.
BASE = "base"


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


@dataclass(frozen=True)
class Popularity:
    """Adapters' names with their weights, which need not add up to 1; the name `base` means no adapter."""

    names: tuple[str, ...]
    weights: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> Whole:
        """Draw `count` indices into `names`."""
        # Inverse transform sampling.
        steps = np.cumsum(self.weights)
        indices = np.searchsorted(steps, rng.random(count) * steps[-1], side="right")
        return np.asarray(np.minimum(indices, len(self.names) - 1), dtype=np.int64)


BASE_ONLY = Popularity((BASE,), (1.0,))


def power_law(names: tuple[str, ...], exponent: float) -> Popularity:
    """Give the k-th name the weight k ** -exponent, as S-LoRA's and Punica's workloads do; 0 is uniform."""
    return Popularity(names, tuple(float(rank) ** -exponent for rank in range(1, len(names) + 1)))


class AdapterTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table `adapters` of a load-test file.

    Names are listed in `names`, or made of a `pattern` with one `{}` for the numbers from 0 to `count` - 1.
    """

    kind: Literal["uniform", "power_law", "file"] = "uniform"
    exponent: NotNegative | None = None
    names: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] | None = None
    pattern: str | None = None
    count: PositiveInt | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        present = {key for key in self.__struct_fields__ if key != "kind" and getattr(self, key) is not None}
        choices = _KEYS[self.kind]
        if present not in [set(keys) for keys in choices]:
            raise ValueError(f"kind {self.kind} takes {', or '.join(' and '.join(keys) for keys in choices)}")
        if self.pattern is not None and self.pattern.count("{}") != 1:
            raise ValueError(f"pattern: {self.pattern!r} must have one {{}}, where the number goes")
        if self.names is not None and len(set(self.names)) != len(self.names):
            raise ValueError("names: an adapter is named twice")

    def popularity(self, directory: Path) -> Popularity:
        """Return the distribution; a `file` is relative to `directory`. Raises PlanError."""
        if self.file is not None:
            path = directory / self.file
            rows = [_weighted(place, line) for place, line in read_lines(path)]
            if len({name for name, _ in rows}) != len(rows):
                raise PlanError(f"{path}: an adapter is named twice")
            return Popularity(tuple(name for name, _ in rows), tuple(weight for _, weight in rows))
        pattern = self.pattern or ""
        names = self.names or tuple(pattern.replace("{}", str(number)) for number in range(self.count or 0))
        return power_law(names, self.exponent or 0.0)


# The keys that each kind takes.
_KEYS = {
    "uniform": (("names",), ("pattern", "count")),
    "power_law": (("exponent", "names"), ("exponent", "pattern", "count")),
    "file": (("file",),),
}


def _weighted(place: str, line: str) -> tuple[str, float]:
    name, comma, weight = (part.strip() for part in line.partition(","))
    try:
        return name, convert(weight if comma else "1", Positive, place, strict=False)
    except PlanError:
        raise PlanError(f"{place}: {line!r} is not NAME,WEIGHT with a weight greater than 0") from None
