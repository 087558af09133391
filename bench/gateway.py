"""The HTTP gateway's cost over gRPC: `python -m bench.gateway [--quick] [--json FILE]`.

A cluster like those of bench.relay with a gateway, and two clients of it: the SDK, which calls the router, and a plain
HTTP client, which calls the gateway by OpenAI's completions. Lone requests of an engine that takes no time, the two in
turns; then 256 streams beside steps of 5 ms, first over gRPC and then over HTTP.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from statistics import median, quantiles
from typing import Any

import uvloop
from loraplex_client import AsyncClient, AsyncStoreClient

from artifacts.base_model import read_base_model
from bench.command import run_command
from bench.http_load import HttpLoad
from bench.relay_load import PROMPT, Flow, Load, Setup
from bench.report import Aim, Report, progress
from clients.cli.models import registered
from deploy.local.cluster import ClusterSettings, LocalCluster

AIMS = {"http_ttft_overhead_ms": Aim(at_most=3), "http_tokens_of_grpc": Aim(at_least=0.7)}
TENANT = "bench"
STEP_MS = 5.0
_BLOCK = 16
_ROOMS = ("gateway", "router", "worker", "valkey")

FULL = Setup(alone=500, probes=0, seconds=8.0, warm_s=1.5)
QUICK = Setup(alone=30, probes=0, seconds=1.0, warm_s=0.5)


def main() -> None:
    """Run the benchmark with the command line's arguments."""
    run_command("gateway", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick))


def measure(setup: Setup, quick: bool) -> Report:
    """Measure both clusters in turn."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        grpc_ms, http_ms = runner.run(lone_requests(setup))
        of_grpc, of_http = runner.run(streams(setup))
    times = {"gRPC, alone": grpc_ms, "HTTP, alone": http_ms}
    return Report(
        name="gateway",
        command="python -m bench.gateway" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup) | {"prompt": len(PROMPT), "step_ms": STEP_MS},
        rows=[*(_ttft_row(name, ms) for name, ms in times.items()), _flow_row(of_grpc), _flow_row(of_http)],
        ratios={
            "http_ttft_overhead_ms": median(http_ms) - median(grpc_ms),
            "http_tokens_of_grpc": of_http.tokens_per_s / of_grpc.tokens_per_s,
        },
        aims=AIMS,
    )


async def lone_requests(setup: Setup) -> tuple[list[float], list[float]]:
    """Return the milliseconds to the first token, over gRPC and over HTTP."""
    async with _cluster(setup, 0.0) as (grpc, http):
        progress("lone requests")
        grpc_ms: list[float] = []
        http_ms: list[float] = []
        for load in (grpc, http):
            await load.ttfts_ms(setup.alone // 5, 0.0)
        for _ in range(setup.alone):
            grpc_ms += await grpc.ttfts_ms(1, 0.0)
            http_ms += await http.ttfts_ms(1, 0.0)
        return grpc_ms, http_ms


async def streams(setup: Setup) -> tuple[Flow, Flow]:
    """Measure the tokens of many streams, over gRPC and over HTTP."""
    async with _cluster(setup, STEP_MS) as (grpc, http):
        found = []
        for name, load in (("gRPC", grpc), ("HTTP", http)):
            progress(f"{setup.many} streams over {name}")
            found.append(await load.flow(f"{setup.many} streams over {name}", setup.many))
        return found[0], found[1]


@asynccontextmanager
async def _cluster(setup: Setup, step_ms: float) -> AsyncIterator[tuple[Load, Load]]:
    model = f"hash:?vocab=32000&seed=1&step_ms={step_ms:g}"
    rows = setup.many + 8
    blocks = rows * (len(PROMPT) + setup.tokens) // _BLOCK
    flags = ("--rows", str(rows), "--kv-blocks", str(blocks), "--step-tokens", "1024")
    settings = ClusterSettings(model, port=0, store_port=0, http_port=0, worker_flags=flags)
    async with LocalCluster(settings) as cluster:
        async with AsyncStoreClient(cluster.store, TENANT) as store:
            base = await asyncio.to_thread(read_base_model, model)
            await store.register_model(registered(base), base.files)
        await cluster.wait_serving()
        pids = {name.partition("-")[0]: process.pid for name, process in cluster.processes.items()}
        pids = {"client": os.getpid()} | {room: pids[room] for room in _ROOMS}
        async with AsyncClient(cluster.router, TENANT) as client:
            http = HttpLoad(setup, step_ms, client, pids, cluster.http)
            yield Load(setup, step_ms, client, pids), http
            http.close()


def _ttft_row(name: str, times: list[float]) -> dict[str, Any]:
    p99 = quantiles(times, n=100, method="inclusive")[98]
    return {"case": name, "requests": len(times), "ttft p50 ms": median(times), "ttft p99 ms": p99}


def _flow_row(flow: Flow) -> dict[str, Any]:
    used = {f"{whose} us/token": us for whose, us in flow.processor_us.items()}
    return {"case": f"{flow.name}, {flow.step_ms:g} ms steps", "tokens/s": flow.tokens_per_s, **used}


if __name__ == "__main__":
    main()
