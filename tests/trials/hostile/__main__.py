"""`make hostile`: sends a table of hostile calls and floods to real clusters; times a quiet tenant meanwhile."""

from __future__ import annotations

import asyncio
import math
import os
import random
import sys
import tempfile
from itertools import cycle, takewhile
from pathlib import Path

# Maximum time in seconds that a case may take, and the most that the quiet tenant's 99th percentile may grow.
CASE_S = 1.0
SLOWER = 1.5
# Maximum of that ratio beside a flood of an address at the proxy, and of MiB that a process has more after it.
SLOWER_AT_EDGE, MORE_MIB = 2.0, 64.0
# Maximum of that ratio beside a flood of a tenant, and maximum seconds between two tokens of a stream beside a large
# Resume of 4 MB.
SLOWER_IN_FLOOD = 3.0
GAP_S = 0.2
SEED = 16
# Number of spans for which the quiet tenant is timed alone and beside hostile calls, in turn, and seconds of each. The
# machine's own noise changes from second to second.
SPANS = 4
SPAN_S = 5.0
# Number of hostile calls a second in these spans, and at once: 400 calls in all. In a last span CALLS callers send as
# fast as they are answered.
PER_S = 20.0
CALLS = 8
# Maximum number of requests that the gateway runs at once, and number of the quiet tenant's requests beside each flood
# of it, all of which it must serve. Floods, gateway and tenant share a process: its times are shown, not bounded.
GATEWAY_REQUESTS = 64
GATEWAY_ASKS = 200


async def main() -> int:
    """Send all cases one by one, then in other orders beside a quiet tenant; print what went wrong, and the times."""
    from loraplex.cli.local import LocalCluster
    from tests.trials.hostile.gateway import quiet_beside_floods
    from tests.trials.hostile.quiet import p99, timed_apart
    from tests.trials.hostile.run import attack, running
    from tests.trials.hostile.table import all_cases

    cases, failures, spans = all_cases(), list[str](), 0

    async def timed_beside(cluster: LocalCluster, per_s: float) -> list[float]:
        """Return the quiet tenant's times while cases are sent, again and again; count what ends without a status."""
        nonlocal spans
        order = random.Random(SEED + spans).sample(cases, len(cases))
        spans += 1
        timing = asyncio.create_task(timed_apart(cluster.router, SPAN_S))
        meanwhile = takewhile(lambda _: not timing.done(), cycle(order))
        failures.extend((await attack(cluster, meanwhile, CALLS, per_s)).failures)
        return await timing

    alone, beside = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="hostile-") as directory:
        async with running(Path(directory)) as cluster:
            one_by_one = await attack(cluster, cases, 1)
            for _ in range(SPANS):
                alone += await timed_apart(cluster.router, SPAN_S)
                beside += await timed_beside(cluster, PER_S)
            flooded = await timed_beside(cluster, math.inf)
        gateway = await quiet_beside_floods(Path(directory), GATEWAY_REQUESTS, GATEWAY_ASKS)
    failures += one_by_one.failures
    slow = {name: took for name, took in one_by_one.seconds.items() if took > CASE_S}
    for line in [*failures[:50], *(f"{name}: {took:.2f} s" for name, took in slow.items())]:
        print(line)
    print("  ".join(f"{count} {status}" for status, count in sorted(one_by_one.statuses.items())))
    print(
        f"{len(cases)} cases, slowest {max(one_by_one.seconds.values()):.2f} s; {len(failures)} without a clean status"
    )
    ms, ratio = [1e3 * p99(ttfts) for ttfts in (alone, beside, flooded)], p99(beside) / p99(alone)
    print(f"quiet tenant: p99 TTFT {ms[0]:.1f} ms alone, {ms[1]:.1f} ms beside {PER_S:g} a second: {ratio:.2f} times")
    print(f"beside {CALLS} callers that send as fast as they are answered: {ms[2]:.1f} ms, {ms[2] / ms[0]:.2f} times")
    for name, seconds in gateway.items():
        shown = f"p99 {1e3 * p99(seconds):.1f} ms" if seconds else "none"
        print(f"gateway, {name}: {len(seconds)} of {GATEWAY_ASKS} requests served, {shown}")
    refused = any(len(seconds) < GATEWAY_ASKS for seconds in gateway.values())
    withstood = await _withstands_floods() & await _withstands_addresses()
    return 1 if failures or slow or refused or ratio > SLOWER or not withstood else 0


async def _withstands_addresses() -> bool:
    """Time the quiet tenant behind the proxy beside one flood of an address after the other; print times and memory."""
    from tests.trials.hostile.edge import FLOODS, SETTLE_S, behind_edge, flooded, processor_time
    from tests.trials.hostile.floods import MODEL, WORKER_FLAGS
    from tests.trials.hostile.quiet import p99, timed_apart
    from tests.trials.hostile.run import running

    withstood = True
    with tempfile.TemporaryDirectory(prefix="hostile-") as directory:
        async with (
            running(Path(directory), MODEL, WORKER_FLAGS, http_port=0) as cluster,
            behind_edge(cluster) as (port, memory),
        ):
            address = f"127.0.0.1:{port}"
            for name, flood in {**FLOODS, "processor time of long echoes elsewhere": processor_time}.items():
                alone, beside = list[float](), list[float]()
                before = memory()
                for _ in range(SPANS):
                    alone += await timed_apart(address, SPAN_S)
                    async with flooded(port, flood):
                        beside += await timed_apart(address, SPAN_S)
                await asyncio.sleep(SETTLE_S)
                more = {part: mib - before[part] for part, mib in memory().items()}
                largest, ratio = max(more, key=more.__getitem__), p99(beside) / p99(alone)
                quick = ratio <= SLOWER_AT_EDGE or flood is processor_time
                withstood = withstood and quick and more[largest] <= MORE_MIB
                times = f"p99 TTFT {1e3 * p99(alone):.1f} ms alone, {1e3 * p99(beside):.1f} ms beside"
                print(f"{name} at the proxy: quiet tenant's {times}: {ratio:.2f} times (aim {SLOWER_AT_EDGE:g})")
                print(f"{name} at the proxy: {largest} has {more[largest]:.0f} MiB more (aim {MORE_MIB:g})")
    return withstood


async def _withstands_floods() -> bool:
    """Time the quiet tenant beside one flood after the other, and streams beside a large Resume; print the times."""
    from tests.trials.hostile.floods import FLOODS, MODEL, WORKER_FLAGS, flooded, longest_gap_beside_a_resume
    from tests.trials.hostile.quiet import p99, timed_apart
    from tests.trials.hostile.run import running

    ratios = list[float]()
    with tempfile.TemporaryDirectory(prefix="hostile-") as directory:
        async with running(Path(directory), MODEL, WORKER_FLAGS) as cluster:
            for name, flood in FLOODS.items():
                alone, beside = list[float](), list[float]()
                for _ in range(SPANS):
                    alone += await timed_apart(cluster.router, SPAN_S)
                    async with flooded(cluster.router, flood):
                        beside += await timed_apart(cluster.router, SPAN_S)
                ratios.append(p99(beside) / p99(alone))
                times = f"p99 TTFT {1e3 * p99(alone):.1f} ms alone, {1e3 * p99(beside):.1f} ms beside {flood.per_s:g}"
                print(f"{name}: quiet tenant's {times} a second: {ratios[-1]:.2f} times (aim {SLOWER_IN_FLOOD:g})")
            gap_s = await longest_gap_beside_a_resume(cluster.router)
    print(f"a Resume of 4 MB: longest gap of another tenant's streams {gap_s:.3f} s (aim {GAP_S:g})")
    return max(ratios) <= SLOWER_IN_FLOOD and gap_s <= GAP_S


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # refused calls are what it is about
    sys.exit(asyncio.run(main()))
