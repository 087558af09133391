"""The engine without a cluster, in this process: it needs only the worker's engine code."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.limit import recorded_steps
from bench.rounds import Timed
from bench.workload import Request, answered_tokens
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.worker.engine.torch_engine import build_engine
from loraplex.worker.engine_api import AdapterSource, EngineConfig, NewSequence, Output

_GREEDY = SamplingParams()


class BareEngine:
    """An engine with at most `rows` sequences in a batch; `settings` are further fields of EngineConfig."""

    def __init__(
        self,
        model: Path,
        adapters: Sequence[Path],
        rows: int,
        device: str = "cpu",
        dtype: str = "bfloat16",
        **settings: Any,
    ) -> None:
        self._engine = build_engine(EngineConfig(str(model), device, dtype, rows, **settings))
        self._adapters = [AdapterSource(directory.name, str(directory)) for directory in adapters]

    def run(self, requests: Sequence[Request]) -> Timed:
        """Answer the requests, which all arrive at once, and time them."""
        with recorded_steps() as steps:
            start = time.perf_counter()
            self.add_requests(requests)
            answered = 0
            while answered < len(requests):
                answered += sum(output.finish is not None for output in self.step())
            seconds = time.perf_counter() - start
        return Timed(answered_tokens(requests), seconds, tuple(steps))

    def add_requests(self, requests: Sequence[Request], first: int = 0, sampling: SamplingParams = _GREEDY) -> None:
        """Add requests; their names are their indices, counted from `first`: "0", "1" and so on."""
        for index, request in enumerate(requests, first):
            self._engine.add_sequence(self._sequence(f"{index}", request, sampling))

    def step(self) -> list[Output]:
        """Run one step. Raises RuntimeError if a sequence failed."""
        outputs = self._engine.step()
        for output in outputs:
            if output.failure:
                raise RuntimeError(f"the engine failed: {output.failure.message}")
        return outputs

    def abort(self, requests: Sequence[Request]) -> None:
        """Abort the requests that have not ended; returns when no step is running."""
        for index in range(len(requests)):
            self._engine.abort(f"{index}")
        while self._engine.has_work():
            self.step()

    def close(self) -> None:
        """End the engine's threads."""
        self._engine.close()

    def _sequence(self, name: str, request: Request, sampling: SamplingParams) -> NewSequence:
        at = request.invoked_at
        adapter = None if request.adapter is None else self._adapters[request.adapter]
        if adapter is not None and at:
            adapter = replace(adapter, invocation=request.prompt_ids[at : at + 1])
        stopping = StoppingParams(request.tokens)
        return NewSequence(
            name, request.prompt_ids, adapter=adapter, sampling=sampling, stopping=stopping, invoked_at=at
        )
