"""Calls a second of one router process, and of two behind one port: `python -m bench.calls [--quick] [--json FILE]`.

Client, routers, Redis, store and one worker with the hash model run as processes of this machine. Requests for one
token run side by side, in a closed loop; then a burst of calls comes at once on one connection. The router's processor
time for a call tells how many calls a second one core of it takes, whatever else the machine does meanwhile.

Then rounds of a cluster with one router process and of one with two take turns, with as many calls side by side for
each process, on many connections, which the kernel spreads. The processes take calls until the busiest one's core is
full.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
import uvloop
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from loraplex.inference.v1 import inference_pb2 as pb

from bench.command import run_command
from bench.local_cluster import process_ids, serving_cluster
from bench.processor_time import children_of, processor_s
from bench.report import Aim, Report, progress
from loraplex.cli.local import ClusterSettings
from loraplex.runtime.rpc.principal import TENANT_KEY
from loraplex.runtime.rpc.server import channel_options
from loraplex.runtime.rpc.status import DETAILS_KEY

AIMS = {
    "calls_per_s_of_a_router_core": Aim(),
    "calls_per_s_here": Aim(),
    "burst_without_a_reason": Aim(at_most=0),
    "two_processes_over_one": Aim(at_least=1.8),
}
PAGE = Path(__file__).parents[1] / "docs" / "results" / "scaling.md"
METHOD = "/loraplex.inference.v1.InferenceService/Generate"
TENANTS = 8
# Processes of the cluster whose processor time is measured.
_ROOMS = ("router", "worker", "valkey")


@dataclass(frozen=True)
class Setup:
    """The sizes of a run: `side_by_side` calls for `seconds` after `warm_s`, then `burst` calls at once.

    Then `rounds` of `round_s` with one router process and with two, on so many connections to each cluster.
    """

    seconds: float
    warm_s: float
    burst: int
    rounds: int
    round_s: float
    connections: int
    side_by_side: int = 64
    prompt: int = 32


FULL = Setup(seconds=10.0, warm_s=2.0, burst=3000, rounds=10, round_s=2.0, connections=512)
QUICK = Setup(seconds=1.0, warm_s=0.5, burst=300, rounds=2, round_s=0.5, connections=64)


@dataclass(frozen=True)
class Flow:
    """Calls of a closed loop, and the processor time in seconds meanwhile, by process."""

    calls: int
    seconds: float
    processor_s: Mapping[str, float]

    def __add__(self, other: Flow) -> Flow:
        """Return the flow of both times together."""
        used = Counter(self.processor_s) + Counter(other.processor_s)
        return Flow(self.calls + other.calls, self.seconds + other.seconds, used)

    @property
    def router_s(self) -> list[float]:
        """Return the processor time of each router process."""
        return [used for name, used in self.processor_s.items() if name.startswith("router")]

    @property
    def calls_per_s_of_cores(self) -> float:
        """Return the calls a second at which the busiest router process fills its core."""
        return self.calls / max(self.router_s)

    def row(self, case: str) -> dict[str, float | str]:
        """Return the row of a table."""
        used = {f"{name} us/call": used / self.calls * 1e6 for name, used in self.processor_s.items()}
        return {"case": case, "calls": self.calls, "calls/s": self.calls / self.seconds, **used}


@dataclass(frozen=True)
class Figures:
    """The measurements: one channel to one router process, a burst of it, and rounds by the number of processes."""

    flow: Flow
    ends: Counter[str]
    burst_s: float
    rounds: Mapping[int, Flow]


def main() -> None:
    """Run the benchmark with the command line's arguments; `--write-docs` writes its tables of the page."""
    run_command("calls", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick), PAGE)


def measure(setup: Setup, quick: bool) -> Report:
    """Measure both clusters."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(_measure(setup))
    ends, one, two = figures.ends, figures.rounds[1], figures.rounds[2]
    flows = [figures.flow.row(f"{setup.side_by_side} side by side"), one.row("one process"), two.row("two processes")]
    return Report(
        name="calls",
        command="python -m bench.calls" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup) | {"tenants": TENANTS},
        rows=[
            *flows,
            *({"case": f"burst: {end}", "calls": count} for end, count in sorted(ends.items())),
            {"case": "burst", "calls": setup.burst, "calls/s": setup.burst / figures.burst_s},
        ],
        page_rows=flows,
        ratios={
            "calls_per_s_of_a_router_core": figures.flow.calls_per_s_of_cores,
            "calls_per_s_here": figures.flow.calls / figures.flow.seconds,
            "burst_without_a_reason": sum(count for end, count in ends.items() if end.endswith("without a reason")),
            "two_processes_over_one": two.calls_per_s_of_cores / one.calls_per_s_of_cores,
        },
        aims=AIMS,
    )


async def _measure(setup: Setup) -> Figures:
    async with AsyncExitStack() as stack:
        sides = {processes: await stack.enter_async_context(_cluster(setup, processes)) for processes in (1, 2)}
        address, pids = sides[1]
        calls = Calls([await stack.enter_async_context(own_channel(address))], setup.prompt)
        progress(f"{setup.side_by_side} calls side by side")
        flow = await calls.flow(setup.side_by_side, setup.warm_s, setup.seconds, pids)
        progress(f"{setup.burst} calls at once")
        began = time.perf_counter()
        ends = Counter(await asyncio.gather(*(calls.end("burst") for _ in range(setup.burst))))
        burst_s = time.perf_counter() - began
        return Figures(flow, ends, burst_s, await _rounds(setup, sides, stack))


async def _rounds(
    setup: Setup, sides: Mapping[int, tuple[str, Mapping[str, int]]], stack: AsyncExitStack
) -> Mapping[int, Flow]:
    """Let the clusters of one and two processes take turns; return the sums of their rounds."""
    callers = {}
    for processes, (address, _) in sides.items():
        channels = [await stack.enter_async_context(own_channel(address)) for _ in range(setup.connections)]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        callers[processes] = Calls(channels, setup.prompt)
    rounds: dict[int, Flow] = {}
    for number in range(setup.rounds):
        progress(f"round {number + 1} of {setup.rounds}, of one and two processes")
        for processes in (1, 2) if number % 2 else (2, 1):
            side_by_side = setup.side_by_side * processes
            flow = await callers[processes].flow(side_by_side, setup.warm_s / 4, setup.round_s, sides[processes][1])
            rounds[processes] = rounds[processes] + flow if processes in rounds else flow
    return rounds


def own_channel(address: str) -> grpc.aio.Channel:
    """Return a channel with a connection of its own."""
    return grpc.aio.insecure_channel(address, options=[*channel_options(), ("grpc.use_local_subchannel_pool", 1)])


class Calls:
    """A client that sends the same request on its channels in turn, with as little work as possible."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], prompt: int, answer: int = 1) -> None:
        """Take the tokens of a prompt and of its answer."""
        self._calls: Iterator[Any] = cycle([channel.unary_stream(METHOD) for channel in channels])
        token_ids = pb.TokenIds(ids=range(prompt))
        spec = pb.GenerateSpec(token_ids=token_ids, stopping=pb.Stopping(max_tokens=answer, ignore_eos=True))
        self._request = pb.GenerateRequest(spec=spec).SerializeToString()
        self.ended = 0

    async def flow(self, side_by_side: int, warm_s: float, measured_s: float, pids: Mapping[str, int]) -> Flow:
        """Call side by side, and measure after the warm-up."""
        tasks = [asyncio.create_task(self._repeat(f"t{number % TENANTS}")) for number in range(side_by_side)]
        try:
            await asyncio.sleep(warm_s)
            ended, began, used = self.ended, time.perf_counter(), processor_s(pids)
            await asyncio.sleep(measured_s)
            calls, seconds, now = self.ended - ended, time.perf_counter() - began, processor_s(pids)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ends:
            if isinstance(error, Exception):
                raise error
        if not calls:
            raise RuntimeError(f"no call ended in {seconds:.1f} s")
        return Flow(calls, seconds, {whose: now[whose] - used.get(whose, 0.0) for whose in now})

    async def _repeat(self, tenant: str) -> None:
        while True:
            end = await self.end(tenant)
            if end != "OK":
                raise RuntimeError(f"a call ended with {end}")
            self.ended += 1

    async def end(self, tenant: str) -> str:
        """Call once; return the code, with the reason that the router gave."""
        try:
            async for _ in next(self._calls)(self._request, metadata=((TENANT_KEY, tenant),)):
                pass
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}, {_reason(error)}"
        return "OK"


def _reason(error: grpc.aio.AioRpcError) -> str:
    given = dict(error.trailing_metadata() or ()).get(DETAILS_KEY)
    info = error_details_pb2.ErrorInfo()
    if isinstance(given, bytes):
        for detail in Status.FromString(given).details:
            if detail.Unpack(info):
                return str(info.reason)
    return "without a reason"


@asynccontextmanager
async def _cluster(setup: Setup, processes: int) -> AsyncIterator[tuple[str, Mapping[str, int]]]:
    """Run a cluster with so many router processes; yields their address, and the processes that are measured."""
    model = "hash:?vocab=32000&seed=1&step_ms=0"
    rows = 4 * setup.side_by_side
    flags = ("--rows", str(rows), "--kv-blocks", str(8 * rows), "--step-tokens", "4096")
    several = ("--processes", str(processes))
    settings = ClusterSettings(model, port=0, store_port=0, worker_flags=flags, router_flags=several)
    async with serving_cluster(settings) as cluster:
        pids = process_ids(cluster, _ROOMS)
        if processes > 1:
            routers = enumerate(children_of(pids["router"]), 1)
            pids = {f"router {number}": pid for number, pid in routers} | pids
            pids["supervisor"] = pids.pop("router")
        yield cluster.router, pids


if __name__ == "__main__":
    main()
