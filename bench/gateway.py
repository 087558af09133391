"""The HTTP gateway's cost over gRPC: `python -m bench.gateway [--quick] [--peer FOLDER] [--json FILE]`.

A cluster like those of bench.relay with a gateway, and two clients of it: the SDK, which calls the router, and a plain
HTTP client, which calls the gateway by OpenAI's completions. Lone requests of an engine that takes no time, the two in
turns; then 256 streams beside steps of 5 ms, first over gRPC and then over HTTP.

With `--peer FOLDER` it measures something else: vLLM's CPU build, which is installed in that folder, serves the
example's model beside our gateway, and the same client asks the two in turn.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median

import uvloop

from bench.command import command_parser, run_parsed
from bench.http_load import HttpLoad, connected
from bench.http_peer import measure_peer
from bench.local_cluster import process_ids, serving_cluster
from bench.relay_load import PROMPT, Flow, Load, Setup, cluster_settings, flow_row, ttft_row
from bench.report import Aim, Report, progress
from loraplex_client import AsyncClient

AIMS = {"http_ttft_overhead_ms": Aim(at_most=3), "http_tokens_of_grpc": Aim(at_least=0.7)}
TENANT = "bench"
STEP_MS = 5.0
_ROOMS = ("gateway", "router", "worker", "valkey")

FULL = Setup(alone=500, probes=0, seconds=8.0, warm_s=1.5)
QUICK = Setup(alone=30, probes=0, seconds=1.0, warm_s=0.5)


def main() -> None:
    """Run the benchmark with the command line's arguments."""
    parser = command_parser("gateway", __doc__ or "")
    parser.add_argument(
        "--peer",
        type=Path,
        metavar="FOLDER",
        help="measure the HTTP server of vLLM's CPU build beside ours instead; FOLDER gets it if it is not there",
    )
    run_parsed(parser, _measure)


def _measure(given: Namespace) -> Report:
    if given.peer is not None:
        return measure_peer(given.quick, given.peer)
    return measure(QUICK if given.quick else FULL, given.quick)


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
        rows=[*(ttft_row(name, ms) for name, ms in times.items()), flow_row(of_grpc), flow_row(of_http)],
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
    settings = cluster_settings(setup, setup.many + 8, step_ms, http_port=0)
    async with serving_cluster(settings) as cluster, AsyncClient(cluster.router, TENANT) as client:
        pids = process_ids(cluster, _ROOMS)
        async with connected(cluster.http) as lone:
            http = HttpLoad(setup, step_ms, client, pids, cluster.http, lone)
            yield Load(setup, step_ms, client, pids), http


if __name__ == "__main__":
    main()
