"""`make authz`: calls every RPC with every role and every fault of its credential, at a real store and router."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path


async def main() -> int:
    """Run all cases; print how many there were, and those whose answer was not the table's."""
    from tests.trials.authz.cases import all_cases
    from tests.trials.authz.cluster import running
    from tests.trials.authz.run import Caller

    cases, began = list(all_cases()), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="authz-") as directory:
        async with running(Path(directory)) as cluster:
            caller = Caller(cluster)
            await caller.settle()
            outcome = await caller.run(cases)
            await caller.close()
    for line in outcome.failures[:50]:
        print(line)
    for word, count in sorted(outcome.counts.items()):
        print(f"{count:>8} {word}")
    right = len(cases) - len(outcome.failures)
    print(f"{len(cases)} cases, {right} as the table says, in {time.monotonic() - began:.0f} s")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # refused handshakes are what it is about
    sys.exit(asyncio.run(main()))
