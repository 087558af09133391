"""`make hostile`: sends the table of hostile calls to a real cluster while a quiet tenant is timed."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path

# Maximum time in seconds that a case may take, and the most that the quiet tenant's 99th percentile may grow.
CASE_S = 1.0
SLOWER = 1.5
SEED = 16
# Time in seconds for which the quiet tenant is timed alone, and again while the table is sent.
SPAN_S = 10.0
CALLS = 8


async def main() -> int:
    """Send all cases, again and again in another order; print what went wrong, and the quiet tenant's times."""
    from tests.hostile.run import Outcome, QuietTenant, attack, p99, running
    from tests.hostile.table import all_cases

    cases, outcome, rounds = all_cases(), Outcome(), 0
    with tempfile.TemporaryDirectory(prefix="hostile-") as directory:
        async with running(Path(directory)) as cluster:
            alone, beside = QuietTenant(cluster), QuietTenant(cluster)
            sending = asyncio.create_task(alone.send())
            await asyncio.sleep(SPAN_S)
            sending.cancel()
            sending, began = asyncio.create_task(beside.send()), time.monotonic()
            while time.monotonic() < began + SPAN_S:
                random.Random(SEED + rounds).shuffle(cases)
                rounds += 1
                found = await attack(cluster, cases, CALLS)
                outcome.failures += found.failures
                outcome.statuses += found.statuses
                for name, took in found.seconds.items():
                    outcome.seconds[name] = max(took, outcome.seconds.get(name, 0.0))
            sending.cancel()
    slow = {name: took for name, took in outcome.seconds.items() if took > CASE_S}
    for line in [*outcome.failures[:50], *(f"{name}: {took:.2f} s" for name, took in slow.items())]:
        print(line)
    ratio = p99(beside.ttfts) / p99(alone.ttfts)
    print(f"{len(cases)} cases, {rounds} rounds of another order from seed {SEED}, {CALLS} calls at once")
    print("  ".join(f"{count} {status}" for status, count in sorted(outcome.statuses.items())))
    print(f"slowest: {max(outcome.seconds.values()):.2f} s; {len(outcome.failures)} without a clean status")
    ms = [1e3 * p99(tenant.ttfts) for tenant in (alone, beside)]
    print(f"quiet tenant: p99 TTFT {ms[0]:.1f} ms alone, {ms[1]:.1f} ms beside: {ratio:.2f} times")
    return 1 if outcome.failures or slow or ratio > SLOWER else 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # refused calls are what it is about
    sys.exit(asyncio.run(main()))
