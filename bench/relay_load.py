"""The load of bench.relay: a client whose streams run side by side, and requests beside them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from bench.processor_time import processor_s
from loraplex.cli.local import ClusterSettings
from loraplex_client import AsyncClient

PROMPT = tuple(range(32))
# Tokens of a KV cache block.
_BLOCK = 16


@dataclass(frozen=True)
class Setup:
    """The sizes of a run. `alone` requests run one after the other, `probes` beside `few` streams.

    `warm_s` and `seconds` are the warm-up and the measurement of running streams.
    """

    alone: int
    probes: int
    seconds: float
    warm_s: float
    few: int = 64
    many: int = 256
    # Tokens of a stream; another stream follows it.
    tokens: int = 2000


@dataclass(frozen=True)
class Flow:
    """The result of streams that ran side by side; `processor_us` is microseconds a token, by process."""

    name: str
    streams: int
    step_ms: float
    tokens: int
    seconds: float
    processor_us: Mapping[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput."""
        return self.tokens / self.seconds


def cluster_settings(setup: Setup, rows: int, step_ms: float, http_port: int | None = None) -> ClusterSettings:
    """Return the settings of a cluster whose one worker runs so many streams at once, with the hash model."""
    blocks = rows * (len(PROMPT) + setup.tokens) // _BLOCK
    flags = ("--rows", str(rows), "--kv-blocks", str(blocks), "--step-tokens", "1024")
    model = f"hash:?vocab=32000&seed=1&step_ms={step_ms:g}"
    return ClusterSettings(model, port=0, store_port=0, http_port=http_port, worker_flags=flags)


class Load:
    """A client and its streams. `received` counts tokens of all of them."""

    def __init__(self, setup: Setup, step_ms: float, client: AsyncClient, pids: Mapping[str, int]) -> None:
        self._setup = setup
        self._step_ms = step_ms
        self._client = client
        self._pids = pids
        self._chance = random.Random(42)
        self.received = 0

    async def ttfts_ms(self, count: int, pause_ms: float) -> list[float]:
        """Return the milliseconds to the first token of requests in sequence, with random pauses around `pause_ms`."""
        times = []
        for _ in range(count):
            start = time.perf_counter()
            async with self._client.generate_stream(token_ids=PROMPT, max_tokens=1) as stream:
                came = [time.perf_counter() - start async for piece in stream if piece.token_ids]
            times.append(came[0] * 1e3)
            # A random pause, so that requests arrive at any moment of a step.
            await asyncio.sleep(self._chance.uniform(0.0, 2.0) * pause_ms / 1e3)
        return times

    async def flow(self, name: str, streams: int) -> Flow:
        """Measure the tokens and the processor time of streams side by side, after all of them have begun."""
        setup = self._setup
        async with self.streams(streams):
            await asyncio.sleep(setup.warm_s)
            began, used, received = time.perf_counter(), processor_s(self._pids), self.received
            await asyncio.sleep(setup.seconds)
            seconds, now, tokens = time.perf_counter() - began, processor_s(self._pids), self.received - received
        if not tokens:
            raise RuntimeError(f"{name}: no token in {seconds:.1f} s")
        us = {whose: (after - used.get(whose, 0.0)) / tokens * 1e6 for whose, after in now.items()}
        return Flow(name, streams, self._step_ms, tokens, seconds, us)

    @asynccontextmanager
    async def streams(self, count: int) -> AsyncIterator[None]:
        """Run `count` streams while the context is open, and cancel them at its end. Raises the error of a stream."""
        started = [asyncio.Event() for _ in range(count)]
        tasks = [asyncio.create_task(self._read(event)) for event in started]
        starting = asyncio.create_task(_all(started))
        try:
            await asyncio.wait({starting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            yield
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in (starting, *tasks):
                task.cancel()
            await asyncio.gather(starting, *tasks, return_exceptions=True)

    async def _read(self, started: asyncio.Event) -> None:
        while True:
            stream = self._client.generate_stream(token_ids=PROMPT, max_tokens=self._setup.tokens)
            async with stream:
                async for piece in stream:
                    self.received += len(piece.token_ids)
                    started.set()


def p99(values: Sequence[float]) -> float:
    """Return the value below which 99% of the values are."""
    return quantiles(values, n=100, method="inclusive")[98]


def ttft_row(name: str, times: Sequence[float]) -> dict[str, Any]:
    """Return a report's row of milliseconds to first tokens."""
    return {"case": name, "requests": len(times), "ttft p50 ms": median(times), "ttft p99 ms": p99(times)}


def flow_row(flow: Flow) -> dict[str, Any]:
    """Return a report's row of streams side by side."""
    steps = f"{flow.step_ms:g} ms steps" if flow.step_ms else "no step"
    used = {f"{whose} us/token": us for whose, us in flow.processor_us.items() if whose != "store"}
    return {"case": f"{flow.name}, {steps}", "tokens/s": flow.tokens_per_s, **used}


async def _all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        await event.wait()
