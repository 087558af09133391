"""How long prompts and answers are: fixed, uniform, log-normal, or drawn from a file's lines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from clients.loadtest.table import PlanError, Table

Whole: TypeAlias = npt.NDArray[np.int64]


class Lengths(Protocol):
    """Numbers of tokens, each at least 1."""

    def draw(self, rng: np.random.Generator, count: int) -> Whole:
        """So many of them."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same."""

    tokens: int

    def draw(self, rng: np.random.Generator, count: int) -> Whole:
        """See Lengths."""
        return np.full(count, self.tokens, dtype=np.int64)


@dataclass(frozen=True)
class Uniform:
    """Every length from `low` to `high`, both included, is as likely."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> Whole:
        """See Lengths."""
        return rng.integers(self.low, self.high + 1, count)


@dataclass(frozen=True)
class LogNormal:
    """The logarithm is normal around log(`median`) with deviation `sigma`; cut at `low` and `high`."""

    median: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> Whole:
        """See Lengths."""
        drawn = np.rint(rng.lognormal(math.log(self.median), self.sigma, count))
        return np.clip(drawn, self.low, self.high).astype(np.int64)


@dataclass(frozen=True)
class Listed:
    """Each of `values` is as likely, so that a length listed twice comes twice as often."""

    values: tuple[int, ...]

    def draw(self, rng: np.random.Generator, count: int) -> Whole:
        """See Lengths."""
        return np.asarray(self.values, dtype=np.int64)[rng.integers(0, len(self.values), count)]


def read_lengths(outer: Table, key: str, default: Lengths) -> Lengths:
    """`key = 64`, or a table with `kind`; `default` where it is absent. Raises PlanError."""
    if key not in outer:
        return default
    table = outer.whole_or_table(key)
    if isinstance(table, int):
        return Fixed(table)
    lengths: Lengths
    match table.text("kind", choices=("fixed", "uniform", "log_normal", "file")):
        case "fixed":
            lengths = Fixed(table.whole("tokens", least=1))
        case "uniform":
            low = table.whole("low", least=1)
            lengths = Uniform(low, table.whole("high", least=low))
        case "log_normal":
            median, sigma = table.number("median", above=0), table.number("sigma", above=0)
            low = table.whole("low", 1, least=1)
            lengths = LogNormal(median, sigma, low, table.whole("high", least=low))
        case _:
            lengths = Listed(tuple(_token_count(place, line) for place, line in table.lines("file")))
    table.finish()
    return lengths


def _token_count(place: str, line: str) -> int:
    if not (line.isascii() and line.isdigit() and int(line) > 0):
        raise PlanError(f"{place}: {line!r} is not a whole number of tokens, 1 or more")
    return int(line)
