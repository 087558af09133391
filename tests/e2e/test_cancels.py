"""Clients that leave at any moment leave nothing behind. CANCELS=100000 (`make cancels`) runs the long form."""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

from loraplex.contracts.options import StoppingParams
from tests.hash_oracle import expected_ids

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
MODEL = "hash:?vocab=32000&seed=1&step_ms=2"
CANCELS = int(os.environ.get("CANCELS", "200"))
AT_ONCE = 100
TOKENS = 30
# There are more requests than rows: about a wait in the queue.
LONGEST_S = 0.5


async def test_cancels_at_any_moment_leave_nothing_behind(
    start_cluster: StartCluster, hash_adapters: Mapping[str, Path], eventually: Eventually
) -> None:
    seed = 7
    print(f"seed {seed}")
    rng, numbers, when = random.Random(seed), iter(range(CANCELS)), Counter[str]()
    flags = ("--rows", "16", "--adapter-slots", "2")
    async with start_cluster(MODEL, hash_adapters, workers=2, worker_flags=flags, routers=2) as cluster:

        async def no_trace() -> bool:
            patterns = ("*:job:*", "*:queue:*", "*:waiting", "*:again")
            return not [key for pattern in patterns async for key in cluster.redis.scan_iter(pattern)]

        async def ask(number: int, most: float, got: dict[int, list[int]]) -> bool:
            """Read up to so many tokens; whether that was all."""
            options = {"adapter_id": "abc"[number % 3], "n": (1, 1, 1, 3)[number % 4], "max_tokens": TOKENS}
            async with cluster.client.generate_stream(f"prompt {number}", **options) as stream:
                async for piece in stream:
                    got.setdefault(piece.choice, []).extend(piece.token_ids)
                    if piece.finished or sum(map(len, got.values())) >= most:
                        return piece.finished is not None
            return False

        async def leave_again_and_again() -> None:
            for number in numbers:
                got: dict[int, list[int]] = {}
                if number % 2:  # wherever it is by then: on its way, in the queue, waiting for its adapter, running
                    asking = asyncio.create_task(ask(number, math.inf, got))
                    await asyncio.wait({asking}, timeout=rng.random() ** 2 * LONGEST_S)
                    asking.cancel()
                    with suppress(asyncio.CancelledError):
                        await asking
                    whole = asking.done() and not asking.cancelled() and asking.result()
                else:
                    whole = await ask(number, rng.randint(1, TOKENS - 1), got)
                when["whole" if whole else "running" if got else "before a token"] += 1
                if number % 10 < 2:
                    check(f"prompt {number}", cluster.digests["abc"[number % 3]], got)

        await asyncio.gather(*(leave_again_and_again() for _ in range(AT_ONCE)))
        print(dict(when))
        assert when["running"] > CANCELS / 3
        assert when["before a token"] > CANCELS / 20
        await eventually(cluster.idle)
        await eventually(no_trace)
        answer = await cluster.client.generate("after", adapter_id="a", max_tokens=TOKENS)
        check("after", cluster.digests["a"], {0: list(answer.token_ids)})


def check(prompt: str, digest: str, got: Mapping[int, list[int]]) -> None:
    """Check that what came before the client left is the beginning of the answer."""
    for choice, ids in got.items():
        stopping = StoppingParams(max_tokens=TOKENS)
        truth = expected_ids(MODEL, list(prompt.encode()), adapter_digest=digest, stopping=stopping, choice=choice)
        assert ids == list(truth[: len(ids)])
