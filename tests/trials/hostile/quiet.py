"""`python -m tests.trials.hostile.quiet ROUTER SECONDS`: a tenant with short requests, its times to first token."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from loraplex_client import AsyncClient

# Pause in seconds between two requests: without one this tenant alone would take half a core.
PAUSE_S = 0.02


class QuietTenant:
    """A tenant that sends one short request after the other; `ttfts` are its times to the first token in seconds."""

    def __init__(self, router: str) -> None:
        self._router = router
        self.ttfts: list[float] = []

    async def send(self) -> None:
        """Send requests until it is cancelled."""
        async with AsyncClient(self._router, "quiet") as client:
            while True:
                began = time.monotonic()
                answer = client.generate_stream(prompt="hello", max_tokens=4, model="hash")
                first = None
                async for _ in answer:
                    first = first or time.monotonic() - began
                self.ttfts.append(first or 0.0)
                await asyncio.sleep(PAUSE_S)


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return sorted(values)[int(len(values) * 0.99)]


async def timed_apart(router: str, span_s: float) -> list[float]:
    """Return the times of a quiet tenant in a process of its own, which nothing else keeps busy."""
    command = (sys.executable, "-m", "tests.trials.hostile.quiet", router, str(span_s))
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    return [float(line) for line in out.split()]


async def main(router: str, span_s: float) -> None:
    """Send requests for a while."""
    quiet = QuietTenant(router)
    sending = asyncio.create_task(quiet.send())
    await asyncio.wait({sending}, timeout=span_s)
    sending.cancel()
    print("\n".join(map(str, quiet.ttfts)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
