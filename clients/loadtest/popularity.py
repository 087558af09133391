"""Which adapters are asked for how often: all alike, by a power law, or as a file says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clients.loadtest.lengths import Whole
from clients.loadtest.table import PlanError, Table

# What stands for requests to the plain base model in lists of adapters.
BASE = "base"


@dataclass(frozen=True)
class Popularity:
    """Adapter `names`, the name `base` being none; their `weights` need not add up to 1."""

    names: tuple[str, ...]
    weights: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> Whole:
        """Indices into `names`."""
        # By the inverse of the distribution: searching a thousand names for each draw costs next to nothing.
        steps = np.cumsum(self.weights)
        found = np.searchsorted(steps, rng.random(count) * steps[-1], side="right")
        return np.asarray(np.minimum(found, len(self.names) - 1), dtype=np.int64)


BASE_ONLY = Popularity((BASE,), (1.0,))


def power_law(names: tuple[str, ...], exponent: float) -> Popularity:
    """The k-th name with weight k ** -exponent, as S-LoRA's and Punica's workloads have it; 0 is uniform."""
    return Popularity(names, tuple(float(rank) ** -exponent for rank in range(1, len(names) + 1)))


def read_popularity(outer: Table, key: str, default: Popularity) -> Popularity:
    """The table `key`; `default` where it is absent. Raises PlanError."""
    if key not in outer:
        return default
    table = outer.table(key)
    match table.text("kind", "uniform", choices=("uniform", "power_law", "file")):
        case "uniform":
            popularity = power_law(_names(table), 0.0)
        case "power_law":
            exponent = table.number("exponent", least=0)
            popularity = power_law(_names(table), exponent)
        case _:
            rows = [_weighted(place, line) for place, line in table.lines("file")]
            popularity = Popularity(tuple(name for name, _ in rows), tuple(weight for _, weight in rows))
    table.finish()
    if len(set(popularity.names)) != len(popularity.names):
        outer.fail(key, "names an adapter twice")
    return popularity


def _names(table: Table) -> tuple[str, ...]:
    """Either `names`, or `pattern` with a `{}` and the `count` of numbers, from 0, to put there."""
    if "names" in table:
        return table.texts("names")
    if "pattern" not in table:
        table.fail("names", "give names, or pattern and count")
    pattern = table.text("pattern")
    if pattern.count("{}") != 1:
        table.fail("pattern", f"{pattern!r} must have one {{}}, where the number goes")
    return tuple(pattern.replace("{}", str(number)) for number in range(table.whole("count", least=1)))


def _weighted(place: str, line: str) -> tuple[str, float]:
    name, comma, weight = (part.strip() for part in line.partition(","))
    try:
        value = float(weight) if comma else 1.0
    except ValueError:
        value = -1.0
    if not name or not 0 < value < float("inf"):
        raise PlanError(f"{place}: {line!r} is not NAME,WEIGHT with a weight greater than 0")
    return name, value
