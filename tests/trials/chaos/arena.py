"""The place where faults strike: the cluster, its clients, and the processes that suffer from a fault already."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc

from tests.trials.chaos.cluster import ChaosCluster
from tests.trials.chaos.driver import Driver
from tests.trials.chaos.history import CrowdCall
from tests.trials.chaos.plan import PlannedFault
from tests.trials.chaos.processes import runs_under

# Timeout in seconds for a victim with streams that no other fault has: the longest stop a router for 14 s, and restart
# all routers in turn.
_VICTIM_S = 60.0


@dataclass
class Strike:
    """A fault that has happened: what it hit, and what proves it. `proof` may still be empty until it is mended.

    `calls` are those of its crowd.
    """

    victim: str
    began: float
    hit: list[int]
    proof: str = ""
    calls: list[CrowdCall] = field(default_factory=list)


@dataclass(frozen=True)
class Victim:
    """A worker with the streams that it has."""

    name: str
    pid: int
    engine_pid: int
    streams: list[int]


@dataclass
class Arena:
    """The cluster, its clients, and who suffers from something already."""

    cluster: ChaosCluster
    driver: Driver
    # By which fault.
    busy: dict[str, int] = field(default_factory=dict)
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, names: list[str], planned: PlannedFault) -> str:
        """Take one of the processes that no other fault has, for this fault until `release`."""
        while True:
            free = sorted(set(names) - self.busy.keys())
            if free:
                name = free[int(planned.pick * len(free))]
                self.busy[name] = planned.number
                return name
            self._released.clear()
            await self._released.wait()

    def release(self, planned: PlannedFault) -> None:
        """The fault has been mended."""
        self.busy = {name: number for name, number in self.busy.items() if number != planned.number}
        self._released.set()

    async def take_router(self, planned: PlannedFault) -> tuple[str, list[int]]:
        """A router that has streams, and these."""
        async with asyncio.timeout(_VICTIM_S):
            while True:
                await self.driver.until_streaming(1)
                on = {name: self.driver.on(door.address) for name, door in self.cluster.doors.items()}
                able = [name for name, streams in on.items() if streams and name not in self.busy]
                if able:
                    name = await self.take(able, planned)
                    return name, on[name]
                await self.driver.allow_more(4)
                await asyncio.sleep(0.02)

    async def take_worker(self, planned: PlannedFault) -> Victim:
        """A worker that has streams."""
        async with asyncio.timeout(_VICTIM_S):
            while True:
                await self.driver.until_streaming(1)
                try:
                    workers = await self.cluster.workers()
                except grpc.aio.AioRpcError:  # another fault's doing
                    workers = {}
                on: dict[str, list[int]] = {}
                for job in await self.cluster.jobs():
                    # A crowd's requests have other ids than numbers.
                    number = job.request_id.partition(".")[0]
                    if job.worker_id and number.isdecimal() and int(number) in self.driver.streaming:
                        on.setdefault(job.worker_id, []).append(int(number))
                pids = {name: self.cluster.processes[name].pid for name in self.cluster.running_workers()}
                # A worker's status may be half a second old, and its engine another by now.
                able = [n for n in on if n in pids and n in workers and runs_under(pids[n], workers[n].engine_pid)]
                if set(able) - self.busy.keys():
                    name = await self.take(able, planned)
                    return Victim(name, pids[name], workers[name].engine_pid, on[name])
                await self.driver.allow_more(4)
                await asyncio.sleep(0.02)
