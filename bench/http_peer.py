"""Two HTTP servers of one real model, asked in turn by one client: our gateway, and that of vLLM's CPU build."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from bench.http_load import Connection, connected
from bench.local_cluster import serving_cluster
from bench.relay_load import ttft_row
from bench.report import Aim, Report, progress
from bench.rounds import Timed
from bench.vllm_peer import serving_vllm
from loraplex.cli.local import ClusterSettings

MODEL = Path(__file__).parents[1] / "examples" / "model"
VOCABULARY, DTYPE = 4096, "float32"
AIMS = {"http_ttft_over_vllm": Aim(), "http_tokens_over_vllm": Aim(), "http_tokens_over_vllm_few": Aim()}
_OURS, _VLLM = "gateway", "vLLM's server"
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
# Number of lone requests before those that are timed.
_WARM_UP = 5
# Maximum bytes of the last events, which have the usage.
_USAGE_BYTES = 2048


@dataclass(frozen=True)
class PeerSizes:
    """The sizes of a run: lone requests, rounds of streams that begin at once, and the tokens of each stream."""

    alone: int
    rounds: int
    few: int = 32
    many: int = 256
    prompt: int = 32
    tokens: int = 64


FULL, QUICK = PeerSizes(alone=50, rounds=3), PeerSizes(alone=5, rounds=1, few=4, many=16, tokens=16)


def measure_peer(quick: bool, folder: Path) -> Report:
    """Measure both servers. Raises RuntimeError or LaunchError where the peer cannot be had."""
    sizes = QUICK if quick else FULL
    rows, ratios = asyncio.run(_compare(sizes, folder))
    return Report(
        name="gateway-peer",
        command="python -m bench.gateway --peer FOLDER" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(sizes) | {"model": MODEL.name, "dtype": DTYPE},
        rows=rows,
        ratios=ratios,
        aims=AIMS,
    )


async def _compare(sizes: PeerSizes, folder: Path) -> tuple[list[Mapping[str, Any]], dict[str, float]]:
    async with _ours(sizes) as ours, serving_vllm(folder, MODEL, sizes.many, DTYPE) as vllm:
        return await compare_servers(sizes, MODEL.name, ours, vllm)


@asynccontextmanager
async def _ours(sizes: PeerSizes) -> AsyncIterator[str]:
    """Run a cluster with a gateway; yield the gateway's address."""
    flags = ("--rows", str(sizes.many), "--dtype", DTYPE, "--worker-id", "worker-1")
    settings = ClusterSettings(str(MODEL), port=0, store_port=0, http_port=0, worker_flags=flags)
    async with serving_cluster(settings) as cluster:
        yield cluster.http


async def compare_servers(
    sizes: PeerSizes, model: str, ours: str, vllm: str
) -> tuple[list[Mapping[str, Any]], dict[str, float]]:
    """Ask both servers at their addresses, in turn; return their rows and the ratios."""
    servers, requests = {_OURS: ours, _VLLM: vllm}, _requests(sizes, model)
    times = await _first_tokens_ms(sizes, servers, requests)
    runs = await _speeds(sizes, servers, requests)
    rows: list[Mapping[str, Any]] = [ttft_row(f"alone, {name}", of) for name, of in times.items()]
    for (name, streams), timed in runs.items():
        rate = median(run.tokens_per_s for run in timed)
        rows.append({"case": f"{streams} streams, {name}", "tokens/s": rate})
    ratios = {
        "http_ttft_over_vllm": median(times[_OURS]) / median(times[_VLLM]),
        "http_tokens_over_vllm": _ratio(runs[_OURS, sizes.many], runs[_VLLM, sizes.many]),
        "http_tokens_over_vllm_few": _ratio(runs[_OURS, sizes.few], runs[_VLLM, sizes.few]),
    }
    return rows, ratios


def _requests(sizes: PeerSizes, model: str) -> Iterator[dict[str, Any]]:
    """Yield requests whose prompts nobody has asked."""
    draw, usage = random.Random(17), {"stream_options": {"include_usage": True}}
    while True:
        prompt = [draw.randrange(5, VOCABULARY) for _ in range(sizes.prompt)]
        yield {"model": model, "prompt": prompt, "max_tokens": sizes.tokens, "ignore_eos": True, **usage}


async def _first_tokens_ms(
    sizes: PeerSizes, servers: Mapping[str, str], requests: Iterator[dict[str, Any]]
) -> dict[str, list[float]]:
    """Return the milliseconds to the first token of lone requests; the first ones warm up."""
    times: dict[str, list[float]] = {name: [] for name in servers}
    async with AsyncExitStack() as stack:
        lone = {name: await stack.enter_async_context(connected(address)) for name, address in servers.items()}
        for number in range(_WARM_UP + sizes.alone):
            for name, connection in lone.items():
                taken = await connection.first_token_ms(next(requests) | {"max_tokens": 1})
                if number >= _WARM_UP:
                    times[name].append(taken)
    return times


async def _speeds(
    sizes: PeerSizes, servers: Mapping[str, str], requests: Iterator[dict[str, Any]]
) -> dict[tuple[str, int], list[Timed]]:
    """Time few and many streams that begin at once; the first round warms up."""
    runs: dict[tuple[str, int], list[Timed]] = {(name, n): [] for n in (sizes.few, sizes.many) for name in servers}
    for turn in range(sizes.rounds + 1):
        for (name, streams), timed in runs.items():
            run = await _run(servers[name], list(islice(requests, streams)))
            progress(f"round {turn} of {sizes.rounds}: {streams} streams, {name}: {run.tokens_per_s:.1f} tokens/s")
            if turn:
                timed.append(run)
    return runs


def _ratio(ours: Sequence[Timed], theirs: Sequence[Timed]) -> float:
    return median(our.tokens_per_s / their.tokens_per_s for our, their in zip(ours, theirs, strict=True))


async def _run(address: str, requests: Sequence[Mapping[str, Any]]) -> Timed:
    """Time requests that are sent at once, each over a connection of its own. Raises RuntimeError on a short answer."""
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(connected(address)) for _ in requests]
        start = time.perf_counter()
        counts = await asyncio.gather(
            *(_tokens(connection, asked) for connection, asked in zip(connections, requests, strict=True))
        )
        seconds = time.perf_counter() - start
    if counts != [asked["max_tokens"] for asked in requests]:
        raise RuntimeError(f"{address}: some answers have other lengths than were asked for: {sorted(set(counts))}")
    return Timed(sum(counts), seconds)


async def _tokens(connection: Connection, asked: Mapping[str, Any]) -> int:
    """Return the tokens of an answer, as its last event says."""
    tail = b""
    async for data in connection.answer(asked):
        tail = (tail + data)[-_USAGE_BYTES:]
    found = _USAGE.findall(tail)
    return int(found[-1]) if found else 0
