"""The cluster's overhead beside its engine: `python -m bench.relay [--quick] [--json FILE]`.

Client, router, Redis, store and one worker with the hash model run as processes of this machine. First the engine takes
no time: lone requests, then a saturated worker. Then its steps take 5 ms: requests beside 64 streams, then 64 and 256
streams. After each lone request comes an empty streaming call to a bare grpc.aio server, so that the ratios hold on any
machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from statistics import median

import uvloop

from bench.command import run_command
from bench.empty_call import empty_calls
from bench.local_cluster import process_ids, serving_cluster
from bench.relay_load import PROMPT, Flow, Load, Setup, cluster_settings, flow_row, p99, ttft_row
from bench.report import Aim, Report, progress
from loraplex_client import AsyncClient

AIMS = {
    "ttft_over_empty_call": Aim(at_most=4),
    "ttft_64_over_empty_call": Aim(at_most=10),
    "ttft_overhead_ms": Aim(at_most=1.5),
    "ttft_overhead_p99_ms": Aim(at_most=5),
    "ttft_overhead_64_ms": Aim(at_most=3),
    "relay_tokens_per_s": Aim(at_least=40_000),
    "step_5ms_of_possible": Aim(at_least=0.75),
}
TENANT = "bench"
# Milliseconds of an engine's step in the second cluster.
STEP_MS = 5.0
# Processes of the cluster whose processor time is measured.
_ROOMS = ("router", "worker", "valkey", "store")


FULL = Setup(alone=500, probes=200, seconds=8.0, warm_s=1.5)
QUICK = Setup(alone=50, probes=20, seconds=1.0, warm_s=0.5)


@dataclass(frozen=True)
class Instant:
    """Measurements with an engine that takes no time: milliseconds to first tokens and of empty calls, a full load."""

    alone_ms: list[float]
    empty_ms: list[float]
    saturated: Flow


@dataclass(frozen=True)
class Stepping:
    """Measurements with an engine with steps of STEP_MS: milliseconds to first tokens beside streams, and two loads."""

    beside_ms: list[float]
    few: Flow
    many: Flow


def main() -> None:
    """Run the benchmark with the command line's arguments."""
    run_command("relay", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick))


def measure(setup: Setup, quick: bool) -> Report:
    """Measure both clusters in turn."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return report(setup, quick, runner.run(without_steps(setup)), runner.run(with_steps(setup)))


def report(setup: Setup, quick: bool, instant: Instant, stepping: Stepping) -> Report:
    """Put both clusters' measurements into one report."""
    # A request beside others waits for half of the step that runs when it arrives, on average, and for its own step.
    alone, beside = median(instant.alone_ms), median(stepping.beside_ms) - 1.5 * STEP_MS
    empty = median(instant.empty_ms)
    times = {
        "empty streaming call": instant.empty_ms,
        "alone, no step": instant.alone_ms,
        f"beside {setup.few} streams, 5 ms steps": stepping.beside_ms,
    }
    flows = (instant.saturated, stepping.few, stepping.many)
    return Report(
        name="relay",
        command="python -m bench.relay" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup) | {"prompt": len(PROMPT), "step_ms": STEP_MS},
        rows=[*(ttft_row(name, ms) for name, ms in times.items()), *map(flow_row, flows)],
        ratios={
            "ttft_over_empty_call": alone / empty,
            "ttft_64_over_empty_call": beside / empty,
            "ttft_overhead_ms": alone,
            "ttft_overhead_p99_ms": p99(instant.alone_ms),
            "ttft_overhead_64_ms": beside,
            "relay_tokens_per_s": instant.saturated.tokens_per_s,
            "step_5ms_of_possible": stepping.many.tokens_per_s / (setup.many / STEP_MS * 1e3),
        },
        aims=AIMS,
    )


async def without_steps(setup: Setup) -> Instant:
    """Measure lone requests, each followed by an empty call, then a saturated cluster."""
    async with _cluster(setup, 0.0) as load:
        progress("lone requests")
        alone_ms: list[float] = []
        empty_ms: list[float] = []
        async with empty_calls() as calls:
            await load.ttfts_ms(setup.alone // 5, 0.0)
            for _ in range(setup.alone):
                alone_ms += await load.ttfts_ms(1, 0.0)
                empty_ms.append(await calls.first_message_ms())
        progress(f"{setup.many} streams, saturated")
        return Instant(alone_ms, empty_ms, await load.flow("saturated", setup.many))


async def with_steps(setup: Setup) -> Stepping:
    """Measure requests beside running streams, then the tokens of few streams and of many."""
    async with _cluster(setup, STEP_MS) as load:
        progress(f"requests beside {setup.few} streams")
        async with load.streams(setup.few):
            await asyncio.sleep(setup.warm_s)
            beside = await load.ttfts_ms(setup.probes, 2 * STEP_MS)
        few = await load.flow(f"{setup.few} streams", setup.few)
        progress(f"{setup.many} streams")
        return Stepping(beside, few, await load.flow(f"{setup.many} streams", setup.many))


@asynccontextmanager
async def _cluster(setup: Setup, step_ms: float) -> AsyncIterator[Load]:
    settings = cluster_settings(setup, setup.many + setup.few, step_ms)
    async with serving_cluster(settings) as cluster, AsyncClient(cluster.router, TENANT) as client:
        yield Load(setup, step_ms, client, process_ids(cluster, _ROOMS))


if __name__ == "__main__":
    main()
