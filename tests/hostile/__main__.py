"""`make hostile`: sends the table of hostile calls to a real cluster, and times a quiet tenant alone and meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from pathlib import Path

# Maximum time in seconds that a case may take, and the most that the quiet tenant's 99th percentile may grow.
CASE_S = 1.0
SLOWER = 1.5
SEED = 16
# Time in seconds for which the quiet tenant is timed alone, and again while CALLS cases at once are sent.
SPAN_S = 10.0
CALLS = 8


async def main() -> int:
    """Send all cases one by one, then again and again in another order; print what went wrong, and the times."""
    from deploy.local.cluster import LocalCluster
    from tests.hostile.quiet import p99, timed_apart
    from tests.hostile.run import attack, running
    from tests.hostile.table import all_cases

    cases, failures, sent = all_cases(), list[str](), 0

    async def attack_forever(cluster: LocalCluster) -> None:
        nonlocal sent
        while True:
            random.Random(SEED + sent).shuffle(cases)
            failures.extend((await attack(cluster, cases, CALLS)).failures)
            sent += len(cases)

    with tempfile.TemporaryDirectory(prefix="hostile-") as directory:
        async with running(Path(directory)) as cluster:
            one_by_one = await attack(cluster, cases, 1)
            alone = await timed_apart(cluster.router, SPAN_S)
            attacking = asyncio.create_task(attack_forever(cluster))
            beside = await timed_apart(cluster.router, SPAN_S)
            attacking.cancel()
    failures += one_by_one.failures
    slow = {name: took for name, took in one_by_one.seconds.items() if took > CASE_S}
    for line in [*failures[:50], *(f"{name}: {took:.2f} s" for name, took in slow.items())]:
        print(line)
    print("  ".join(f"{count} {status}" for status, count in sorted(one_by_one.statuses.items())))
    print(
        f"{len(cases)} cases, slowest {max(one_by_one.seconds.values()):.2f} s; {len(failures)} without a clean status"
    )
    ms, ratio = [1e3 * p99(ttfts) for ttfts in (alone, beside)], p99(beside) / p99(alone)
    print(f"quiet tenant: p99 TTFT {ms[0]:.1f} ms alone, {ms[1]:.1f} ms beside {CALLS} of them: {ratio:.2f} times")
    return 1 if failures or slow or ratio > SLOWER else 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # refused calls are what it is about
    sys.exit(asyncio.run(main()))
