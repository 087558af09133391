"""What a load test is: immutable, and the same in every generator process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from clients.loadtest.arrivals import Arrivals, Closed, Constant, Extent, Gamma
from clients.loadtest.conditions import Slo
from clients.loadtest.lengths import Fixed, Lengths
from clients.loadtest.popularity import BASE_ONLY, Popularity

# Of prompts and answers where nobody says.
TOKENS = Fixed(64)


@dataclass(frozen=True)
class Deadline:
    """A `share` of the requests has a deadline, so long after it is sent."""

    share: float
    after_s: float


@dataclass(frozen=True)
class Cancel:
    """A `share` of the requests is cancelled once so many tokens have come."""

    share: float
    after_tokens: Lengths


@dataclass(frozen=True)
class Tenant:
    """Who asks, with which `weight` among the tenants, and what for. With `prompts`, `prompt_tokens` does not count."""

    name: str
    weight: float = 1.0
    adapters: Popularity = BASE_ONLY
    prompts: tuple[str, ...] = ()
    prompt_tokens: Lengths = TOKENS
    answer_tokens: Lengths = TOKENS
    deadline: Deadline | None = None
    cancel: Cancel | None = None
    slos: tuple[Slo, ...] = ()


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace; None is what its tenant's own settings decide."""

    at_s: float
    tenant: str | None = None
    adapter: str | None = None
    prompt: str | None = None
    prompt_tokens: int | None = None
    answer_tokens: int | None = None


@dataclass(frozen=True)
class Plan:
    """A load test: one run, or one for each value of `sweep` (a concurrency or a rate)."""

    name: str
    arrivals: Arrivals
    extent: Extent
    tenants: tuple[Tenant, ...]
    trace: tuple[TraceRow, ...] = ()
    sweep: tuple[float, ...] = ()
    seed: int = 1
    model: str = ""
    # Of every request that has no deadline, so that a test ends whatever the cluster does.
    timeout_s: float = 120.0
    processes: int = 1

    def points(self) -> list[tuple[str, Plan]]:
        """The runs, each with its label and as a plan without a sweep."""
        if not self.sweep:
            return [(describe(self.arrivals), self)]
        found = []
        for value in self.sweep:
            arrivals: Arrivals
            match self.arrivals:
                case Closed():
                    arrivals = Closed(int(value))
                case Constant() | Gamma():
                    arrivals = dataclasses.replace(self.arrivals, rate_per_s=value)
                case _:
                    raise TypeError(f"a sweep over {self.arrivals}")  # plan_file lets none through
            found.append((describe(arrivals), dataclasses.replace(self, arrivals=arrivals, sweep=())))
        return found


def describe(arrivals: Arrivals) -> str:
    """In few words."""
    match arrivals:
        case Closed(concurrency):
            return f"closed loop, {concurrency} at once"
        case Constant(rate_per_s):
            return f"constant, {rate_per_s:g}/s"
        case Gamma(rate_per_s, 1.0):
            return f"Poisson, {rate_per_s:g}/s"
        case Gamma(rate_per_s, cv):
            return f"Gamma with cv {cv:g}, {rate_per_s:g}/s"
        case _:
            return type(arrivals).__name__.lower()
