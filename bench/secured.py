"""The cost of credentials and of the ledger: `python -m bench.secured [--quick] [--json FILE]`.

Two clusters like bench.relay's run at the same time. One has neither; the other has TLS and an API key at its door,
mTLS on the relay and to the store, sealed jobs, a plan of the tenant and usage events. Lone requests, then full loads
go to the one and the other in turn, while the engines' steps take no time.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import uvloop

from bench.command import run_command
from bench.local_cluster import process_ids, serving_cluster
from bench.relay_load import PROMPT, Flow, Load, Setup, cluster_settings
from bench.report import Aim, Report, progress
from bench.secured_cluster import TENANT, SecuredCluster
from loraplex.cli.local import ClusterSettings
from loraplex_client import AsyncClient

AIMS = {"ttft_more_ms": Aim(at_most=1.0), "tokens_per_s_of_plain": Aim(at_least=0.9)}
# Processes of a cluster whose processor time is measured.
_ROOMS = ("router", "worker", "valkey", "store")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run: rounds of each side in turn, lone requests of a round, and the loads."""

    rounds: int
    alone: int
    load: Setup


FULL = Sizes(rounds=5, alone=100, load=Setup(alone=0, probes=0, seconds=4.0, warm_s=1.0))
QUICK = Sizes(rounds=2, alone=15, load=Setup(alone=0, probes=0, seconds=1.0, warm_s=0.5))


def main() -> None:
    """Run the benchmark with the command line's arguments."""
    run_command("secured", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick))


def measure(sizes: Sizes, quick: bool) -> Report:
    """Measure both clusters."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(sizes, quick))


async def _measure(sizes: Sizes, quick: bool) -> Report:
    times: dict[str, list[float]] = {"plain": [], "secured": []}
    flows: dict[str, list[Flow]] = {"plain": [], "secured": []}
    async with _plain(sizes.load) as plain, _secured(sizes.load) as secured:
        sides = {"plain": plain, "secured": secured}
        for load in sides.values():
            await load.ttfts_ms(sizes.alone, 0.0)
        progress("lone requests")
        for _ in range(sizes.rounds * sizes.alone):
            for name, load in sides.items():
                times[name] += await load.ttfts_ms(1, 0.0)
        for number in range(sizes.rounds):
            progress(f"{sizes.load.few} streams, round {number + 1} of {sizes.rounds}")
            for name, load in sides.items():
                flows[name].append(await load.flow(name, sizes.load.few))
    speeds = {name: [flow.tokens_per_s for flow in of] for name, of in flows.items()}
    ratios = [after / before for before, after in zip(speeds["plain"], speeds["secured"], strict=True)]
    return Report(
        name="secured",
        command="python -m bench.secured" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(sizes) | {"prompt": len(PROMPT)},
        rows=[_row(name, times[name], flows[name]) for name in times],
        ratios={
            "ttft_more_ms": median(times["secured"]) - median(times["plain"]),
            "tokens_per_s_of_plain": median(ratios),
        },
        aims=AIMS,
    )


def _row(name: str, times: list[float], flows: list[Flow]) -> dict[str, object]:
    used = {
        room: median(flow.processor_us[room] for flow in flows) for room in ("client", "router", "worker", "valkey")
    }
    return {
        "case": name,
        "ttft p50 ms": median(times),
        "tokens/s": median(flow.tokens_per_s for flow in flows),
        **{f"{room} us/token": us for room, us in used.items()},
    }


def _settings(setup: Setup) -> ClusterSettings:
    return cluster_settings(setup, 2 * setup.few, 0.0)


@asynccontextmanager
async def _plain(setup: Setup) -> AsyncIterator[Load]:
    async with serving_cluster(_settings(setup)) as cluster, AsyncClient(cluster.router, TENANT) as client:
        yield Load(setup, 0.0, client, process_ids(cluster, _ROOMS))


@asynccontextmanager
async def _secured(setup: Setup) -> AsyncIterator[Load]:
    with tempfile.TemporaryDirectory(prefix="lp-") as name:
        cluster = SecuredCluster(_settings(setup), Path(name))
        async with cluster:
            key = await cluster.prepare()
            async with AsyncClient(cluster.router, api_key=key, tls=cluster.tls) as client:
                yield Load(setup, 0.0, client, process_ids(cluster, _ROOMS))


if __name__ == "__main__":
    main()
