"""The load of bench.overload: raw gRPC calls of many tenants, at the times of a clock or one after the other."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from loraplex.inference.v1 import inference_pb2 as pb

from loraplex.loadtest.arrivals import Extent, Poisson, arrival_times
from loraplex.loadtest.draws import power_law
from loraplex.runtime.rpc.principal import TENANT_KEY
from loraplex_client.errors import error_of

# Interval in seconds of the samples of how late the client's event loop wakes up.
_PROBE_S = 0.02
_PROMPT = "overload"


@dataclass(frozen=True)
class Setup:
    """The sizes of a run: `loads` are multiples of the measured capacity, each offered for `seconds`.

    `unloaded` is the load whose TTFT the others are compared with. The first `warm_s` of each load are not reported.
    An answer has `shortest` to `longest` tokens, and is in time when it is whole after `deadline_s`.
    """

    loads: Sequence[float]
    seconds: float
    warm_s: float
    capacity_s: float
    unloaded: float = 0.3
    tenants: int = 1000
    # Tenant k asks k ** -skew as often as the first.
    skew: float = 2.0
    routers: int = 2
    workers: int = 2
    rows: int = 12
    step_ms: float = 250.0
    shortest: int = 4
    longest: int = 12
    deadline_s: float = 15.0

    @property
    def possible_per_s(self) -> float:
        """Return the answers a second of a cluster whose rows are never empty."""
        return self.workers * self.rows / ((self.shortest + self.longest) / 2 * self.step_ms / 1e3)

    @property
    def waiting(self) -> int:
        """Return how many jobs may wait: as many as can be served within half of the deadline."""
        return math.ceil(self.possible_per_s * self.deadline_s / 2)

    def rates(self, per_s: float) -> list[float]:
        """Return the tenants' rates that add up to `per_s`."""
        weights = power_law(tuple(map(str, range(self.tenants))), self.skew).weights
        return [per_s * weight / sum(weights) for weight in weights]


@dataclass
class Sample:
    """A call and its end. Times are seconds from the start of its run; `due_s` is when the clock said to send it."""

    tenant: int
    due_s: float
    first_s: float = math.nan
    ended_s: float = math.nan
    tokens: int = 0
    code: str = ""
    reason: str = ""

    @property
    def answered(self) -> bool:
        """Return whether the whole answer came."""
        return self.code == "OK"


class Load:
    """A client of all routers in turn, without retries. `delays_s` are samples of its event loop's delay."""

    def __init__(self, setup: Setup, stubs: Sequence[Any]) -> None:
        self._setup = setup
        self._stubs = stubs
        self._sent = 0
        self.delays_s: list[float] = []

    async def closed(self, clients: int, seconds: float) -> list[Sample]:
        """Let so many clients call one after the other for `seconds`; return all calls."""
        samples: list[Sample] = []
        rng = np.random.default_rng(1)

        async def ask(began: float, tenant: int) -> None:
            while (now := time.monotonic() - began) < seconds:
                samples.append(await self._call(began, Sample(tenant, now), self._length(rng)))

        began = time.monotonic()
        await asyncio.gather(*(ask(began, number % self._setup.tenants) for number in range(clients)))
        return samples

    async def open(self, per_s: float, seed: int) -> list[Sample]:
        """Send calls for `setup.seconds`, whatever becomes of them; return them all when the last has ended."""
        times = arrival_times(Poisson(per_s), Extent(duration_s=self._setup.seconds), seed)
        rng = np.random.default_rng([seed, 2])
        names = tuple(map(str, range(self._setup.tenants)))
        tenants = power_law(names, self._setup.skew).draw(rng, len(times))
        self.delays_s = []
        probe = asyncio.create_task(self._probe())
        began = time.monotonic()
        calls: list[asyncio.Task[Sample]] = []
        for due_s, tenant in zip(times.tolist(), tenants.tolist(), strict=True):
            # Calls that are late are sent at once, with arrived messages read in between.
            await asyncio.sleep(max(0.0, began + due_s - time.monotonic()))
            calls.append(asyncio.create_task(self._call(began, Sample(tenant, due_s), self._length(rng))))
        samples = await asyncio.gather(*calls)
        probe.cancel()
        return samples

    def _length(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self._setup.shortest, self._setup.longest, endpoint=True))

    async def _call(self, began: float, sample: Sample, tokens: int) -> Sample:
        self._sent += 1
        stub = self._stubs[self._sent % len(self._stubs)]
        spec = pb.GenerateSpec(prompt=f"{_PROMPT} {self._sent}", stopping=pb.Stopping(max_tokens=tokens))
        metadata = ((TENANT_KEY, f"tenant-{sample.tenant}"),)
        call = stub.Generate(pb.GenerateRequest(spec=spec), timeout=self._setup.deadline_s, metadata=metadata)
        try:
            async for response in call:
                came = len(response.event.delta.token_ids)
                if came and not sample.tokens:
                    sample.first_s = time.monotonic() - began
                sample.tokens += came
            sample.code = "OK"
        except grpc.aio.AioRpcError as error:
            sample.code, sample.reason = error.code().name, error_of(error, "").reason
        sample.ended_s = time.monotonic() - began
        return sample

    async def _probe(self) -> None:
        """Sample the event loop's delay until cancelled: messages are read late by as much."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(_PROBE_S)
            self.delays_s.append(max(0.0, time.monotonic() - began - _PROBE_S))


def fair_share(rates: Sequence[float], capacity: float) -> float:
    """Return the rate that a tenant is served at most, where all share `capacity` so that none has more than it asks.

    Infinite where there is enough for all.
    """
    left, share = capacity, math.inf
    for served, rate in enumerate(sorted(rates)):
        share = left / (len(rates) - served)
        if rate > share:
            return share
        left -= rate
    return math.inf


def within_share(samples: Iterable[Sample], share_per_s: float) -> list[Sample]:
    """Return the calls that come when a tenant served at `share_per_s` has none of its earlier calls left.

    The virtual scheduling algorithm of ATM's traffic contracts (ITU-T I.371), without tolerance.
    """
    found: list[Sample] = []
    free_s: dict[int, float] = {}
    for sample in sorted(samples, key=lambda sample: sample.due_s):
        at_s = free_s.get(sample.tenant, 0.0)
        if at_s <= sample.due_s:
            found.append(sample)
        free_s[sample.tenant] = max(at_s, sample.due_s) + 1 / share_per_s
    return found
