"""More load than there is capacity: `python -m bench.overload [--quick] [--json FILE]`.

Routers, Redis, store and workers with the hash model run as processes of this machine. A closed loop measures the
capacity; then 1,000 tenants with skewed rates offer multiples of it in an open loop, by a clock and not by completions,
over plain gRPC without retries. Each call is accounted for at the client, the routers and their metrics; the command
fails where these differ.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

import grpc
import uvloop
from loraplex.inference.v1 import inference_pb2_grpc

from bench.command import run_command
from bench.local_cluster import serving_cluster
from bench.overload_accounts import Accounts, Count
from bench.overload_load import Load, Sample, Setup, fair_share, within_share
from bench.processor_time import processor_s
from bench.report import Aim, Report, progress
from loraplex.cli.local import ClusterSettings
from loraplex.runtime.rpc.server import channel_options

AIMS = {
    "goodput_20x_of_peak": Aim(at_least=0.9),
    "quiet_ttft_p99_ratio": Aim(at_most=2),
    "router_memory_peak_mib": Aim(),
    "unaccounted_calls": Aim(at_most=0),
}
FULL = Setup(loads=(1, 2, 5, 10, 20), seconds=40.0, warm_s=10.0, capacity_s=15.0)
QUICK = Setup(loads=(1, 20), seconds=6.0, warm_s=2.0, capacity_s=4.0, workers=1, rows=8, step_ms=100.0, deadline_s=4.0)
# Clients of the closed loop for each row: some wait in the queue, so that no row is ever empty.
_CLIENTS_PER_ROW = 1.5
# Interval in seconds of the samples of the routers' memory.
_MEMORY_S = 0.25
# Columns of the page.
_PAGE = ("case", "calls/s", "client", "answered", "tokens/s in time", "ttft p50 ms", "ttft p99 ms")


@dataclass(frozen=True)
class Run:
    """A load and what came of it. `memory_mib` are samples, `cores` processor seconds a second by process."""

    load: float
    per_s: float
    samples: Sequence[Sample]
    count: Count
    memory_mib: Sequence[float]
    delays_s: Sequence[float]
    cores: dict[str, float]
    # The rate that a tenant gets at most, were the capacity shared so that none has more than it asks.
    share_per_s: float


class Overload:
    """The runs of one cluster."""

    def __init__(self, setup: Setup, load: Load, accounts: Accounts) -> None:
        self._setup = setup
        self._load = load
        self._accounts = accounts
        self.capacity_per_s = 0.0

    async def measure_capacity(self) -> None:
        """Measure the answers a second of clients that wait for their answers, in the second half of the time."""
        clients = math.ceil(self._setup.workers * self._setup.rows * _CLIENTS_PER_ROW)
        samples = await self._load.closed(clients, self._setup.capacity_s)
        self.capacity_per_s = answers_per_s(samples, self._setup.capacity_s)

    async def run(self, load: float, seed: int) -> Run:
        """Offer a multiple of the capacity."""
        per_s = load * self.capacity_per_s
        share_per_s = fair_share(self._setup.rates(per_s), self.capacity_per_s)
        before, used = await self._accounts.now(), processor_s(self._pids())
        memory_mib: list[float] = []
        sampling = asyncio.create_task(self._sample_memory(memory_mib))
        try:
            samples = await self._load.open(per_s, seed)
        finally:
            sampling.cancel()
        seconds = max(sample.ended_s for sample in samples)
        now = processor_s(self._pids())
        cores: defaultdict[str, float] = defaultdict(float)
        for name, after in now.items():
            cores[name.partition("-")[0]] += (after - used.get(name, 0.0)) / seconds
        count = await self._accounts.after(before, len(samples))
        progress(f"{load:g}x: {len(samples)} calls, {sum(s.answered for s in samples)} answered")
        return Run(load, per_s, samples, count, memory_mib, tuple(self._load.delays_s), dict(cores), share_per_s)

    def _pids(self) -> dict[str, int]:
        return {"client": os.getpid(), **self._accounts.pids()}

    async def _sample_memory(self, memory_mib: list[float]) -> None:
        while True:
            memory_mib.append(self._accounts.memory_mib())
            await asyncio.sleep(_MEMORY_S)


def main() -> int:
    """Run the benchmark with the command line's arguments; exit code 1 where a call is unaccounted for."""
    report = run_command("overload", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick))
    unaccounted = report.ratios["unaccounted_calls"]
    if unaccounted:
        print(f"error: {unaccounted:g} calls are not accounted for alike", file=sys.stderr)
    return int(unaccounted > 0)


def measure(setup: Setup, quick: bool) -> Report:
    """Measure all loads on one cluster."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(setup, quick))


async def _measure(setup: Setup, quick: bool) -> Report:
    async with _cluster(setup) as overload:
        progress("closed loop")
        await overload.measure_capacity()
        unloaded = await overload.run(setup.unloaded, 1)
        runs = [await overload.run(load, number) for number, load in enumerate(setup.loads, start=2)]
    return report(setup, quick, overload.capacity_per_s, unloaded, runs)


@asynccontextmanager
async def _cluster(setup: Setup) -> AsyncIterator[Overload]:
    model = f"hash:?vocab=32000&seed=1&step_ms={setup.step_ms:g}"
    settings = ClusterSettings(
        model,
        workers=setup.workers,
        routers=setup.routers,
        port=0,
        store_port=0,
        worker_flags=("--rows", str(setup.rows)),
        router_flags=("--waiting-limit", str(setup.waiting)),
    )
    async with serving_cluster(settings) as cluster, AsyncExitStack() as stack:
        stubs = []
        for address in cluster.routers:
            channel = grpc.aio.insecure_channel(address, options=channel_options())
            stubs.append(inference_pb2_grpc.InferenceServiceStub(await stack.enter_async_context(channel)))
        yield Overload(setup, Load(setup, stubs), Accounts(cluster))


def answers_per_s(samples: Sequence[Sample], seconds: float) -> float:
    """Return the answers a second in the second half of a closed loop. Raises RuntimeError without one."""
    half_s = seconds / 2
    ended = [sample for sample in samples if sample.answered and half_s <= sample.ended_s <= seconds]
    if not ended:
        raise RuntimeError(f"no answer in {half_s:g} s of the closed loop")
    return len(ended) / half_s


def report(setup: Setup, quick: bool, capacity_per_s: float, unloaded: Run, runs: Sequence[Run]) -> Report:
    """Put all runs into one report."""
    goodput = {run.load: _goodput_per_s(setup, run) for run in runs}
    peak = max(goodput.values())
    most = max(runs, key=lambda run: run.load)
    everyone = (unloaded, *runs)
    rows = [_row(setup, run) for run in everyone]
    return Report(
        name="overload",
        command="python -m bench.overload" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup) | {"capacity_per_s": capacity_per_s, "waiting": setup.waiting},
        rows=[
            {"case": "closed loop", "answers/s": capacity_per_s},
            *rows,
            *(row for run in everyone for row in _refusals(run)),
        ],
        page_rows=[{key: row[key] for key in _PAGE} for row in rows],
        ratios={
            "goodput_20x_of_peak": goodput[most.load] / peak if peak else math.nan,
            "quiet_ttft_p99_ratio": _p99(_quiet_ttfts_ms(setup, most)) / _p99(_quiet_ttfts_ms(setup, unloaded)),
            "router_memory_peak_mib": max(mib for run in everyone for mib in run.memory_mib),
            "unaccounted_calls": sum(_unaccounted(run) for run in everyone),
        },
        aims=AIMS,
    )


def _goodput_per_s(setup: Setup, run: Run) -> float:
    """Return the tokens a second of the whole answers that came in time, after the warm-up."""
    within = (s for s in run.samples if s.answered and setup.warm_s <= s.ended_s <= setup.seconds)
    return sum(s.tokens for s in within if s.ended_s - s.due_s <= setup.deadline_s) / (setup.seconds - setup.warm_s)


def _quiet_ttfts_ms(setup: Setup, run: Run) -> list[float]:
    """Return the TTFTs of calls within their tenants' share; one without an answer counts as one at its deadline."""
    quiet = (s for s in within_share(run.samples, run.share_per_s) if s.due_s >= setup.warm_s)
    return [1e3 * (s.first_s - s.due_s if s.answered else setup.deadline_s) for s in quiet] or [math.nan]


def _unaccounted(run: Run) -> int:
    """Return by how many calls the client, the routers and the metrics differ at most."""
    sums = (len(run.samples), run.count.routers.total(), run.count.metrics)
    return max(sums) - min(sums)


def _row(setup: Setup, run: Run) -> dict[str, Any]:
    answered = [sample for sample in run.samples if sample.answered]
    ttfts_ms = _quiet_ttfts_ms(setup, run)
    return {
        "case": f"{run.load:g}x",
        "calls/s": run.per_s,
        "client": len(run.samples),
        "routers": run.count.routers.total(),
        "metrics": run.count.metrics,
        "answered": len(answered),
        "tokens/s in time": _goodput_per_s(setup, run),
        "quiet calls": len(ttfts_ms),
        "ttft p50 ms": median(ttfts_ms),
        "ttft p99 ms": _p99(ttfts_ms),
        "MiB": run.memory_mib[0],
        "peak MiB": max(run.memory_mib),
        "late p99 ms": 1e3 * _p99(run.delays_s),
        **{f"{name} cores": run.cores[name] for name in ("client", "router") if name in run.cores},
    }


def _refusals(run: Run) -> list[dict[str, Any]]:
    """Return a row for each status and reason with which calls ended without an answer."""
    ends = Counter(f"{s.code} {s.reason}".strip() for s in run.samples if not s.answered)
    return [{"case": f"{run.load:g}x: {end}", "calls": count} for end, count in ends.most_common()]


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


if __name__ == "__main__":
    sys.exit(main())
