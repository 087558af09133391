"""The engine without a cluster, with far more adapters than slots, and the scenarios that bench.adapters runs on it.

A scenario is a picklable callable that takes the engine, for example `AdapterEngine.run(Saturated(...))`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.limit import Step, recorded_steps
from bench.trace import Arrival, Trace, draw
from bench.workload import Request
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine.process import freeze_gc
from loraplex.worker.engine.torch_engine import build_engine
from loraplex.worker.engine_api import AdapterSource, EngineConfig, EngineStats, NewSequence, Output

R = TypeVar("R")


class AdapterEngine:
    """An engine in bfloat16, configured as in a worker's engine process.

    The files of adapter i are in directory i mod the number of directories; each adapter has its own digest.
    """

    def __init__(self, model: Path, directories: Sequence[Path], vocabulary: int, **settings: Any) -> None:
        """Build the engine; `settings` are further fields of EngineConfig."""
        self._loaded = threading.Event()
        self._engine = build_engine(EngineConfig(str(model), dtype="bfloat16", **settings), on_loaded=self._loaded.set)
        freeze_gc()
        self._directories = directories
        self.vocabulary = vocabulary
        self._names = 0
        self._live: set[str] = set()

    def run(self, requests: Callable[[AdapterEngine], R]) -> R:
        """Run a scenario, then abort its remaining sequences; return the scenario's result."""
        try:
            return requests(self)
        finally:
            self.abort()

    def add_request(self, request: Request, *, unknown: bool = False) -> str:
        """Add a request and return its name. `unknown` gives its adapter a new digest, so that its files are read."""
        self._names += 1
        name = f"{self._names}"
        adapter = None
        if request.adapter is not None:
            directory = self._directories[request.adapter % len(self._directories)]
            adapter = AdapterSource(f"new-{name}" if unknown else f"a{request.adapter}", str(directory))
        self._engine.add_sequence(
            NewSequence(name, request.prompt_ids, adapter=adapter, stopping=StoppingParams(request.tokens), tenant=name)
        )
        self._live.add(name)
        return name

    def step(self, until: float | None = None) -> list[Output]:
        """Run one step. If all sequences wait for adapters, wait for a load first, at most until `until`.

        `until` is a time of perf_counter; when it passes, no step runs. Raises RuntimeError if a sequence failed.
        """
        while not self._engine.has_work():
            left = None if until is None else until - time.perf_counter()
            if left is not None and left <= 0:
                return []
            self._loaded.wait(left)
            self._loaded.clear()
        outputs = self._engine.step()
        for output in outputs:
            if output.failure:
                raise RuntimeError(f"the engine failed: {output.failure.message}")
            if output.finish:
                self._live.discard(output.sequence_id)
        return outputs

    def abort(self) -> None:
        """Abort every sequence that has not ended."""
        for name in self._live:
            self._engine.abort(name)
        self._live.clear()
        while self._engine.has_work():
            self._engine.step()

    def first_token_s(self, request: Request, *, unknown: bool = False) -> float:
        """Return the seconds from a lone request's arrival to its first token."""
        start = time.perf_counter()
        name = self.add_request(request, unknown=unknown)
        while not any(output.sequence_id == name and output.token_ids for output in self.step()):
            pass
        taken = time.perf_counter() - start
        self.abort()
        return taken

    @property
    def stats(self) -> EngineStats:
        """Return the engine's current statistics."""
        return self._engine.stats()

    def close(self) -> None:
        """End the engine's threads."""
        self._engine.close()


@dataclass(frozen=True)
class Saturation:
    """The result of a Saturated scenario; `steps` are the engine's steps while it ran."""

    requests: int
    tokens: int
    seconds: float
    swaps: int
    steps: tuple[Step, ...]

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Saturated:
    """A closed loop over a trace with `in_flight` requests at a time, until all but the last `in_flight` have ended."""

    trace: Trace
    prompts: int
    in_flight: int

    def __call__(self, engine: AdapterEngine) -> Saturation:
        """Run the scenario."""
        waiting = deque(arrival.request for arrival in draw(self.trace, engine.vocabulary, self.prompts))
        ends = len(waiting) - self.in_flight
        swaps = engine.stats.tiers.swaps
        ended = tokens = 0
        with recorded_steps() as steps:
            start = time.perf_counter()
            for _ in range(self.in_flight):
                engine.add_request(waiting.popleft())
            while ended < ends:
                for output in engine.step():
                    tokens += len(output.token_ids)
                    if output.finish:
                        ended += 1
                        if waiting:
                            engine.add_request(waiting.popleft())
            seconds = time.perf_counter() - start
        return Saturation(ended, tokens, seconds, engine.stats.tiers.swaps - swaps, tuple(steps))


@dataclass(frozen=True)
class FirstTokens:
    """An open loop that adds the trace's requests at their times.

    Returns the seconds to the first token of each request after the first `warm_up`.
    """

    trace: Trace
    prompts: int
    warm_up: int

    def __call__(self, engine: AdapterEngine) -> list[float]:
        """Run the scenario."""
        coming = deque(draw(self.trace, engine.vocabulary, self.prompts))
        names: dict[str, Arrival] = {}
        taken: dict[str, float] = {}
        start = time.perf_counter()
        while len(taken) < self.trace.requests:
            while coming and start + coming[0].at_s <= time.perf_counter():
                arrival = coming.popleft()
                names[engine.add_request(arrival.request)] = arrival
            for output in engine.step(until=start + coming[0].at_s if coming else None):
                if output.token_ids and output.sequence_id not in taken:
                    # Timed from the trace's arrival time, so that a delay by the step that was running counts.
                    taken[output.sequence_id] = time.perf_counter() - start - names[output.sequence_id].at_s
        return [taken[name] for name in list(names)[self.warm_up :]]


def resident_bytes() -> int:
    """Return this process's resident memory in bytes, from /proc (Linux only)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
