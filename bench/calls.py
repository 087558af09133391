"""Calls a second of one router process: `python -m bench.calls [--quick] [--json FILE]`.

Client, router, Redis, store and one worker with the hash model run as processes of this machine. Requests for one token
run side by side, in a closed loop; then a burst of calls comes at once on one connection. The router's processor time
for a call tells how many calls a second one core of it takes, whatever else the machine does meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from loraplex.inference.v1 import inference_pb2 as pb

from bench.command import run_command
from bench.local_cluster import process_ids, serving_cluster
from bench.processor_time import processor_s
from bench.report import Aim, Report, progress
from bench.tables import rewrite
from deploy.local.cluster import ClusterSettings
from rpc.identity.principal import TENANT_KEY
from rpc.server import channel_options
from rpc.status import DETAILS_KEY

AIMS = {
    "calls_per_s_of_a_router_core": Aim(),
    "calls_per_s_here": Aim(),
    "burst_without_a_reason": Aim(at_most=0),
}
PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
METHOD = "/loraplex.inference.v1.InferenceService/Generate"
TENANTS = 8
# Processes of the cluster whose processor time is measured.
_ROOMS = ("router", "worker", "valkey")


@dataclass(frozen=True)
class Setup:
    """The sizes of a run: `side_by_side` calls for `seconds` after `warm_s`, then `burst` calls at once."""

    seconds: float
    warm_s: float
    burst: int
    side_by_side: int = 64
    prompt: int = 32


FULL = Setup(seconds=10.0, warm_s=2.0, burst=3000)
QUICK = Setup(seconds=1.0, warm_s=0.5, burst=300)


@dataclass(frozen=True)
class Flow:
    """Calls of a closed loop; `processor_us` is microseconds a call, by process."""

    calls: int
    seconds: float
    processor_us: Mapping[str, float]


def main() -> None:
    """Run the benchmark with the command line's arguments; a full run rewrites its table of the page."""
    report = run_command("calls", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick))
    if not report.quick:
        PAGE.write_text(rewrite(PAGE.read_text(), report.to_json()))


def measure(setup: Setup, quick: bool) -> Report:
    """Measure a cluster."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        flow, ends, burst_s = runner.run(_measure(setup))
    rate = flow.calls / flow.seconds
    side_by_side = {"case": f"{setup.side_by_side} side by side", "calls": flow.calls, "calls/s": rate}
    used = {f"{whose} us/call": us for whose, us in flow.processor_us.items()}
    return Report(
        name="calls",
        command="python -m bench.calls" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup) | {"tenants": TENANTS},
        rows=[
            side_by_side | used,
            *({"case": f"burst: {end}", "calls": count} for end, count in sorted(ends.items())),
            {"case": "burst", "calls": setup.burst, "calls/s": setup.burst / burst_s},
        ],
        ratios={
            "calls_per_s_of_a_router_core": 1e6 / flow.processor_us["router"],
            "calls_per_s_here": rate,
            "burst_without_a_reason": sum(count for end, count in ends.items() if end.endswith("without a reason")),
        },
        aims=AIMS,
    )


async def _measure(setup: Setup) -> tuple[Flow, Counter[str], float]:
    async with (
        _cluster(setup) as (address, pids),
        grpc.aio.insecure_channel(address, options=channel_options()) as channel,
    ):
        calls = Calls(channel, setup.prompt)
        progress(f"{setup.side_by_side} calls side by side")
        flow = await calls.flow(setup, pids)
        progress(f"{setup.burst} calls at once")
        began = time.perf_counter()
        ends = Counter(await asyncio.gather(*(calls.end("burst") for _ in range(setup.burst))))
        return flow, ends, time.perf_counter() - began


class Calls:
    """A client that sends the same request again and again, with as little work as possible."""

    def __init__(self, channel: grpc.aio.Channel, prompt: int) -> None:
        self._call: Any = channel.unary_stream(METHOD)
        token_ids = pb.TokenIds(ids=range(prompt))
        spec = pb.GenerateSpec(token_ids=token_ids, stopping=pb.Stopping(max_tokens=1))
        self._request = pb.GenerateRequest(spec=spec).SerializeToString()
        self.ended = 0

    async def flow(self, setup: Setup, pids: Mapping[str, int]) -> Flow:
        """Call side by side, and measure after the warm-up."""
        tasks = [asyncio.create_task(self._repeat(f"t{number % TENANTS}")) for number in range(setup.side_by_side)]
        try:
            await asyncio.sleep(setup.warm_s)
            ended, began, used = self.ended, time.perf_counter(), processor_s(pids)
            await asyncio.sleep(setup.seconds)
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
        return Flow(calls, seconds, {whose: (now[whose] - used.get(whose, 0.0)) / calls * 1e6 for whose in now})

    async def _repeat(self, tenant: str) -> None:
        while True:
            end = await self.end(tenant)
            if end != "OK":
                raise RuntimeError(f"a call ended with {end}")
            self.ended += 1

    async def end(self, tenant: str) -> str:
        """Call once; return the code, with the reason that the router gave."""
        try:
            async for _ in self._call(self._request, metadata=((TENANT_KEY, tenant),)):
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
async def _cluster(setup: Setup) -> AsyncIterator[tuple[str, Mapping[str, int]]]:
    model = "hash:?vocab=32000&seed=1&step_ms=0"
    rows = 2 * setup.side_by_side
    flags = ("--rows", str(rows), "--kv-blocks", str(8 * rows), "--step-tokens", "4096")
    async with serving_cluster(ClusterSettings(model, port=0, store_port=0, worker_flags=flags)) as cluster:
        yield cluster.router, process_ids(cluster, _ROOMS)


if __name__ == "__main__":
    main()
