"""Scenarios of bench.adapters about adapter loads: beside decodes, for a lone request, and ten thousand in a row."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bench.adapter_engine import AdapterEngine, resident_bytes
from bench.trace import random_ids
from bench.workload import Request

# Tokens of an arriving request's prompt and of its answer: few, because the scenario measures the adapter's load and
# not a long prefill.
_ARRIVAL_TOKENS = 8
# Interval in seconds between arrivals.
_EVERY_S = 0.1
# Requests in flight while adapters are swapped.
_IN_FLIGHT = 64


class Loads(Enum):
    """The requests that arrive beside decodes: none, or ten short ones a second with loaded or with new adapters."""

    NONE = "nothing arrives"
    WARM = "10 requests a second"
    COLD = "10 new adapters a second"


@dataclass(frozen=True)
class DecodingGaps:
    """Decoding sequences, each with its own adapter, and arrivals; returns the seconds between the decodes' tokens."""

    loads: Loads
    seconds: float
    decodes: int
    seed: int

    def __call__(self, engine: AdapterEngine) -> list[float]:
        """Run the scenario."""
        chance = random.Random(f"{self.seed} {self.loads}")
        watched = {
            engine.add_request(_request(chance, engine, 8, 8000, adapter)): 0.0 for adapter in range(self.decodes)
        }
        # Warm-up: the adapters of warm arrivals are loaded, and the decodes pass their first steps.
        for adapter in range(self.decodes, self.decodes + 4):
            engine.add_request(_request(chance, engine, _ARRIVAL_TOKENS, _ARRIVAL_TOKENS, adapter))
        for _ in range(60):
            engine.step()
        gaps: list[float] = []
        start = time.perf_counter()
        arrived = 0
        while (now := time.perf_counter()) < start + self.seconds:
            if self.loads is not Loads.NONE and now >= start + arrived * _EVERY_S:
                request = _request(chance, engine, _ARRIVAL_TOKENS, _ARRIVAL_TOKENS, self.decodes + arrived % 4)
                engine.add_request(request, unknown=self.loads is Loads.COLD)
                arrived += 1
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                before = watched.get(output.sequence_id)
                if before is not None:
                    if before:
                        gaps.append(now - before)
                    watched[output.sequence_id] = now
        return gaps


@dataclass(frozen=True)
class LoneFirstTokens:
    """Lone requests of 64 tokens on an idle engine; returns the seconds to the first token, by the adapter's place.

    Each of the `repeats` uses the next of the last `cycle` of `adapters`, which are more than the slots, and asks
    twice: the first request finds the adapter in host memory, the second in its slot.
    """

    repeats: int
    adapters: int
    cycle: int

    def __call__(self, engine: AdapterEngine) -> dict[str, list[float]]:
        """Run the scenario."""
        chance = random.Random(self.repeats)
        cycle = min(self.cycle, self.adapters)
        taken: dict[str, list[float]] = {"in host memory": [], "in a slot": []}
        # The first cycle is a warm-up: it brings each adapter to host memory, and its slot is taken again before its
        # next turn.
        for turn in range(cycle + self.repeats):
            for seconds in taken.values():
                adapter = self.adapters - cycle + turn % cycle
                first_token_s = engine.first_token_s(_request(chance, engine, 64, 1, adapter))
                if turn >= cycle:
                    seconds.append(first_token_s)
        return taken


@dataclass(frozen=True)
class Swapping:
    """Requests for random adapters, far more than slots, until `swaps` swaps; returns the memory's growth in MB.

    `warm_up` swaps run before the measurement: they fill the tiers and grow the process's buffers.
    """

    swaps: int
    warm_up: int
    adapters: int

    def __call__(self, engine: AdapterEngine) -> float:
        """Run the scenario."""
        chance = random.Random(1)

        def swap(count: int) -> None:
            until = engine.stats.tiers.swaps + count
            in_flight = 0
            while engine.stats.tiers.swaps < until:
                for _ in range(_IN_FLIGHT - in_flight):
                    engine.add_request(_request(chance, engine, _ARRIVAL_TOKENS, 1, chance.randrange(self.adapters)))
                in_flight = _IN_FLIGHT - sum(output.finish is not None for output in engine.step())
            engine.abort()

        swap(self.warm_up)
        before = resident_bytes()
        swap(self.swaps)
        return (resident_bytes() - before) / 1e6


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that `percent` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _request(chance: random.Random, engine: AdapterEngine, prompt: int, tokens: int, adapter: int) -> Request:
    return Request(random_ids(chance, prompt, engine.vocabulary), tokens, adapter)
