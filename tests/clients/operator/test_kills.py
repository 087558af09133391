"""An operator that is killed in the middle of an adapter's life: when it is back, the life goes on as if nothing was.

OPERATOR_KILLS moments, spread evenly over the calls that the API server and the store get in a life: half of them are
before the call is carried out, half between that and its answer. `make operator` takes 20.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tests.clients.operator.running import World

MOMENTS = int(os.environ.get("OPERATOR_KILLS", "2"))


async def live_a_life(world: World, name: str, seed: int) -> None:
    """Apply an adapter, edit it, apply it twice, and delete it."""
    spec = {"tenant": "acme", "base": "base", "adapter": name}
    first, second = world.source(f"{name}-1", seed), world.source(f"{name}-2", seed + 1)
    world.kube.apply("LoraAdapter", name, source=first, **spec)
    await world.until(name, "Live")
    digest = (await world.live(name)).digest
    assert digest == world.status(name)["digest"]
    for _ in range(2):
        world.kube.apply("LoraAdapter", name, source=second, **spec)
    await world.until(name, "Live")
    assert (await world.live(name)).digest == world.status(name)["digest"] != digest
    assert await world.releases(name) == [(first, "RETIRED"), (second, "LIVE")]
    world.kube.delete(name)
    await world.gone(name)
    assert await world.live(name) is None


class Killer:
    """Kills the operator at a call of a number, counted from 1, and starts it again."""

    def __init__(self, world: World, number: int) -> None:
        self._world, self._calls_left = world, number
        self._killed = asyncio.Event()
        self.call = ""
        world.on_call = self._count

    def _count(self, call: str) -> None:
        self._calls_left -= 1
        if not self._calls_left:
            self.kill(call)

    def kill(self, call: str) -> None:
        """Kill the operator, unless it was killed."""
        if not self.call:
            self.call = call
            self._world.kill()
            self._killed.set()

    async def restart(self) -> None:
        """Start the operator after it was killed."""
        await self._killed.wait()
        await self._world.ended()
        await self._world.start()


async def test_a_life_goes_on_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    async with World(tmp_path).running() as world:
        calls: list[str] = []
        world.on_call = calls.append
        await world.start()
        for name in ("first", "undisturbed"):  # the first one is slower, with more looks meanwhile
            calls.clear()
            await live_a_life(world, name, 0)
        total = len(calls)
        assert {"ImportRevision", "after CreateRelease", "after PromoteRelease", "after DeleteAdapter"} <= set(calls)

        killed_at = []
        for moment in range(MOMENTS):
            killer = Killer(world, 1 + total * moment // MOMENTS)
            restarting = asyncio.create_task(killer.restart())
            async with asyncio.timeout(60):
                await live_a_life(world, f"life-{moment}", 10 * (moment + 1))
                killer.kill("its end, which came after fewer calls")
                await restarting
            killed_at.append(killer.call)
        print(f"{total} calls in a life; killed at: {', '.join(killed_at)}")
