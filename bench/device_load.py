"""The engine on a device under a closed loop: each answer that ends is followed by the next request at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bench.bare_engine import BareEngine
from bench.device_ceilings import spread
from bench.report import Figures, progress
from bench.workload import Request, Workload
from loraplex.contracts.options import SamplingParams

SAMPLINGS = {
    "greedy": SamplingParams(),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.2),
}
# Seeds that no other measurement uses, so that no prompt is in the prefix cache.
_SEED = 3_000_000
# Tokens of a KV cache block.
_BLOCK = 16


@dataclass(frozen=True)
class LoadSetup:
    """The sizes: rows that are kept busy, numbers of adapters; a loop has `turns` requests for each row."""

    rows: tuple[int, ...] = (64, 256)
    adapters: tuple[int, ...] = (0, 1, 64)
    prompt: int = 512
    answer: int = 128
    turns: int = 2


@dataclass(frozen=True)
class Loop:
    """A loop's answered tokens, its seconds, the seconds to each first token, and the longest between two tokens."""

    tokens: int
    seconds: float
    first_s: Sequence[float]
    silence_s: float


def measure_load(setup: LoadSetup, model: Path, adapters: Sequence[Path], vocabulary: int, device: str) -> Figures:
    """Start an engine, and run all loops on it."""
    rows, tokens = max(setup.rows), setup.prompt + setup.answer
    sizes: dict[str, Any] = {"kv_blocks": rows * -(-tokens // _BLOCK) + 1, "block_size": _BLOCK}
    began = time.perf_counter()
    engine = BareEngine(
        model, adapters, rows, device, adapter_slots=max(1, *setup.adapters), max_rank=16, step_tokens=4096, **sizes
    )
    ready_s = time.perf_counter() - began
    try:
        first = closed_loop(engine, Workload(1, setup.prompt, 1, 1).draw(_SEED, vocabulary), 1, SamplingParams())
        figures = [spread("cold start", "s", [ready_s]), spread("cold start, first token", "s", first.first_s)]
        for seed, (width, name, count) in enumerate(product(setup.rows, SAMPLINGS, setup.adapters), _SEED + 1):
            work = Workload(width * setup.turns, setup.prompt, setup.answer, setup.answer)
            loop = closed_loop(engine, work.draw(seed, vocabulary, count), width, SAMPLINGS[name])
            case = f"closed loop, {width} rows, {name}, {count} adapters"
            progress(f"{case}: {loop.tokens / loop.seconds:.0f} tokens/s")
            figures += [
                spread(case, "tokens/s", [loop.tokens / loop.seconds]),
                spread(f"{case}, first token", "s", loop.first_s),
                spread(f"{case}, longest silence", "s", [loop.silence_s]),
            ]
    finally:
        engine.close()
    return Figures(figures)


def closed_loop(engine: BareEngine, requests: Sequence[Request], width: int, sampling: SamplingParams) -> Loop:
    """Answer the requests, `width` at a time."""
    waiting = deque(enumerate(requests))
    added: dict[str, float] = {}
    last: dict[str, float] = {}
    first_s: list[float] = []
    tokens = ended = 0
    silence_s = 0.0

    def add() -> None:
        number, request = waiting.popleft()
        added[f"{number}"] = time.perf_counter()
        engine.add_requests([request], number, sampling)

    start = time.perf_counter()
    for _ in range(min(width, len(requests))):
        add()
    while ended < len(requests):
        for output in engine.step():
            now, name = time.perf_counter(), output.sequence_id
            if output.token_ids:
                tokens += len(output.token_ids)
                if name in last:
                    silence_s = max(silence_s, now - last[name])
                else:
                    first_s.append(now - added[name])
                last[name] = now
            if output.finish:
                ended += 1
                if waiting:
                    add()
    return Loop(tokens, time.perf_counter() - start, first_s, silence_s)
