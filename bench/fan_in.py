"""Measure the cost of many workers' messages at one router: `python -m bench.fan_in [--quick] [--json FILE]`.

A simulation tells what one of the routers gets from all workers: messages, frames and tokens a second, with the workers
paced by the router and without. Then messages of that size and at that rate go over real links to a real relay, in a
process of its own, whose processor time gives the cost of a message. With --write-docs the figures go into
docs/results/scaling.md.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop

from bench.command import run_command
from bench.fan_in_messages import Fleet, Traffic, simulate
from bench.fan_in_router import job_id
from bench.processor_time import processor_s
from bench.report import Aim, Report, progress
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc
from loraplex.router.dispatch.relay import PaceLimits
from loraplex.runtime.rpc.server import relay_options

AIMS = {
    "cores_of_a_router": Aim(at_most=0.4),
    "cores_of_a_router_unpaced": Aim(),
    "us_per_message": Aim(),
    "us_per_token": Aim(),
    "longest_wait_ms": Aim(at_most=50),
}
PAGE = Path(__file__).parents[1] / "docs" / "results" / "scaling.md"


@dataclass(frozen=True)
class Setup:
    """The sizes: the cluster that is simulated, and the links and seconds of the measurement."""

    fleet: Fleet
    links: int
    seconds: float
    warm_s: float


FULL = Setup(Fleet(), links=200, seconds=10.0, warm_s=2.0)
QUICK = Setup(Fleet(seconds=2.0), links=50, seconds=2.0, warm_s=0.5)


@dataclass(frozen=True)
class Case:
    """The traffic of a router at one interval, and the processor time of a message."""

    name: str
    interval_ms: float
    traffic: Traffic
    us_per_message: float

    @property
    def cores(self) -> float:
        """Return the cores that a router needs for the messages of all workers."""
        return self.us_per_message * self.traffic.messages_per_s / 1e6

    @property
    def us_per_token(self) -> float:
        """Return the processor time of a token, in microseconds."""
        return self.cores / self.traffic.tokens_per_s * 1e6


def main() -> None:
    """Run the benchmark with the command line's arguments; `--write-docs` writes its tables of the page."""
    run_command("fan_in", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick), PAGE)


def measure(setup: Setup, quick: bool) -> Report:
    """Simulate and measure both cases."""
    paced_ms = PaceLimits().interval_ms(setup.fleet.workers)
    paced = _case("paced", setup, paced_ms)
    unpaced = _case("a message after each step", setup, 0)
    return Report(
        name="fan_in",
        command="python -m bench.fan_in" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup),
        rows=[_row(case) for case in (paced, unpaced)],
        ratios={
            "cores_of_a_router": paced.cores,
            "cores_of_a_router_unpaced": unpaced.cores,
            "us_per_message": paced.us_per_message,
            "us_per_token": paced.us_per_token,
            "longest_wait_ms": paced.traffic.longest_wait_ms,
        },
        aims=AIMS,
    )


def _case(name: str, setup: Setup, interval_ms: float) -> Case:
    traffic = simulate(setup.fleet, interval_ms)
    progress(f"{name}: {traffic.messages_per_s:.0f} messages/s of {setup.fleet.workers} workers")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        cost_us = runner.run(_cost_us(setup, traffic, traffic.messages_per_s / setup.fleet.workers))
    return Case(name, interval_ms, traffic, cost_us)


def _row(case: Case) -> dict[str, Any]:
    traffic = case.traffic
    return {
        "messages": case.name,
        "interval ms": case.interval_ms,
        "messages/s": traffic.messages_per_s,
        "frames a message": traffic.frames_of_message,
        "tokens/s": traffic.tokens_per_s,
        "longest wait ms": traffic.longest_wait_ms,
        "us/message": case.us_per_message,
        "us/token": case.us_per_token,
        "cores": case.cores,
    }


async def _cost_us(setup: Setup, traffic: Traffic, rate: float) -> float:
    """Return the microseconds of a relay's process for each message of such traffic, at so many a second and link."""
    jobs = max(1, round(traffic.frames_of_message + 1))
    async with _relay(setup.links * jobs) as (port, pid):
        links = [_Link(number, jobs, traffic, rate) for number in range(setup.links)]
        tasks = [asyncio.create_task(link.run(port)) for link in links]
        try:
            await asyncio.sleep(setup.warm_s)
            used, sent = processor_s({"router": pid}), sum(link.sent for link in links)
            await asyncio.sleep(setup.seconds)
            now, messages = processor_s({"router": pid}), sum(link.sent for link in links) - sent
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return (now.get("router", 0.0) - used.get("router", 0.0)) / messages * 1e6


@asynccontextmanager
async def _relay(jobs: int) -> AsyncIterator[tuple[int, int]]:
    """Start a router's relay with so many jobs; yield its port and process id."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.fan_in_router", str(jobs)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(await process.stdout.readline()), process.pid
    finally:
        process.stdin.close()
        await process.wait()


class _Link:
    """A worker's link whose messages have the mean size of the traffic, at random moments of the same rate."""

    def __init__(self, number: int, jobs: int, traffic: Traffic, rate: float) -> None:
        self._number = number
        self._jobs = [job_id(number * jobs + job) for job in range(jobs)]
        self._offsets = [0] * jobs
        self._traffic = traffic
        self._rate = rate
        self._chance = random.Random(number)
        self._turn = 0
        self.sent = 0

    async def run(self, port: int) -> None:
        """Send until cancelled."""
        options = [*relay_options(), ("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            async for _ in relay_pb2_grpc.RelayServiceStub(channel).Connect(self._requests()):
                pass
        raise RuntimeError("the relay ended the stream")

    async def _requests(self) -> AsyncIterator[pb.ConnectRequest]:
        name = f"worker-{self._number}"
        yield pb.ConnectRequest(hello=pb.Hello(worker_id=name, incarnation=name))
        due = time.monotonic() + self._chance.random() / self._rate
        while True:
            await asyncio.sleep(due - time.monotonic())
            due += self._chance.uniform(0.8, 1.2) / self._rate
            self.sent += 1
            yield pb.ConnectRequest(frames=pb.FrameBatch(frames=list(self._frames())))

    def _frames(self) -> list[pb.Frame]:
        frames = []
        for _ in range(self._about(self._traffic.frames_of_message)):
            job = self._turn = (self._turn + 1) % len(self._jobs)
            count, offset = max(1, self._about(self._traffic.tokens_of_frame)), self._offsets[job]
            self._offsets[job] += count
            ids = range(offset % 30_000, offset % 30_000 + count)
            frames.append(pb.Frame(job_id=self._jobs[job], attempt=1, offset=offset, token_ids=ids))
        return frames

    def _about(self, mean: float) -> int:
        """Round up or down at random, so that the mean stays."""
        return int(mean + self._chance.random())


if __name__ == "__main__":
    main()
