"""The plan of a load test: immutable, and the same in every generator process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import msgspec

from clients.loadtest.arrivals import Arrivals, Closed, Constant, Extent, Gamma, Poisson
from clients.loadtest.conditions import Slo
from clients.loadtest.decoding import Decoded, NotNegative, Positive, PositiveInt, Share
from clients.loadtest.draws import BASE_ONLY, Fixed, Lengths, Popularity

Task = Literal["generate", "embed", "classify"]
# Maximum number of generator processes of a run: each starts a Python with gRPC, which takes half a second of a core
# and 50 MiB, and sends thousands of requests a second.
PROCESSES = 64
# Default length of prompts and of answers, in tokens.
TOKENS = Fixed(64)


class Deadline(Decoded, frozen=True):
    """A deadline `after_s` seconds after sending, for a `share` of the requests."""

    share: Share
    after_s: Positive

    def __str__(self) -> str:
        return f"{self.after_s:g} s for {100 * self.share:g}% of the requests"


@dataclass(frozen=True)
class Cancel:
    """A cancel by the client after `after_tokens` tokens, for a `share` of the requests."""

    share: float
    after_tokens: Lengths

    def __str__(self) -> str:
        return f"of {100 * self.share:g}% of the requests, after tokens: {self.after_tokens}"


@dataclass(frozen=True)
class Tenant:
    """A tenant with its `weight` and what it asks for. With `prompts`, `prompt_tokens` does not count."""

    name: str
    weight: float = 1.0
    adapters: Popularity = BASE_ONLY
    prompts: tuple[str, ...] = ()
    prompt_tokens: Lengths = TOKENS
    answer_tokens: Lengths = TOKENS
    deadline: Deadline | None = None
    cancel: Cancel | None = None
    slos: tuple[Slo, ...] = ()


class TraceRow(Decoded, frozen=True):
    """A request of a trace. Its tenant's own settings decide what is None."""

    at_s: NotNegative
    tenant: str | None = None
    adapter: str | None = None
    prompt: str | None = None
    prompt_tokens: PositiveInt | None = None
    answer_tokens: PositiveInt | None = None


@dataclass(frozen=True)
class LoadPlan:
    """A load test: one run, or one for each value of `sweep` (a concurrency or a rate)."""

    name: str
    arrivals: Arrivals
    extent: Extent
    tenants: tuple[Tenant, ...]
    trace: tuple[TraceRow, ...] = ()
    sweep: tuple[float, ...] = ()
    seed: int = 1
    model: str = ""
    # Timeout of every request that has no deadline, so that a test ends whatever the cluster does.
    timeout_s: float = 120.0
    processes: int = 1
    # What the requests call: Generate, or Embed or Classify, each with so many texts.
    task: Task = "generate"
    texts: int = 1

    def points(self) -> list[tuple[str, LoadPlan]]:
        """Return the runs, each with its label and as a plan without a sweep."""
        if not self.sweep:
            return [(describe(self.arrivals), self)]
        runs = []
        for value in self.sweep:
            arrivals: Arrivals
            match self.arrivals:
                case Closed():
                    arrivals = Closed(int(value))
                case Poisson() | Constant() | Gamma():
                    arrivals = msgspec.structs.replace(self.arrivals, rate_per_s=value)
                case _:
                    raise TypeError(f"a sweep over {self.arrivals}")  # plan_file refuses these.
            runs.append((describe(arrivals), dataclasses.replace(self, arrivals=arrivals, sweep=())))
        return runs


def describe(arrivals: Arrivals) -> str:
    """Return the label of a run with these arrivals, as in `Poisson, 5/s`."""
    match arrivals:
        case Closed(concurrency):
            return f"closed loop, {concurrency} at once"
        case Constant(rate_per_s):
            return f"constant, {rate_per_s:g}/s"
        case Poisson(rate_per_s) | Gamma(rate_per_s, 1.0):
            return f"Poisson, {rate_per_s:g}/s"
        case Gamma(rate_per_s, cv):
            return f"Gamma with cv {cv:g}, {rate_per_s:g}/s"
        case _:
            return type(arrivals).__name__.lower()
