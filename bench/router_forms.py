"""Routers as processes behind one port, or each by itself: `python -m bench.router_forms [--quick] [--json FILE]`.

Both forms run beside each other on one worker with the hash model. The table has their memory, the time from start to
the last router that listens, their processor time for a call and for a token, in turns, and how many streams break when
a process is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import uvloop

from bench.calls import PAGE, Calls, Flow, own_channel
from bench.command import run_command
from bench.local_cluster import serving_cluster
from bench.processor_time import children_of
from bench.report import Aim, Report, progress
from loraplex.cli.local import ClusterSettings, LocalCluster

AIMS = {
    "processes_over_routers_us_a_call": Aim(),
    "processes_over_routers_us_a_token": Aim(),
    "processes_over_routers_memory": Aim(),
}
MODEL = "hash:?vocab=32000&seed=1&step_ms=5"
PROMPT = 32


@dataclass(frozen=True)
class Setup:
    """The sizes of a run: `side_by_side` calls on as many connections, in `rounds` of `round_s` after `warm_s`.

    Answers have one token, or `answer` tokens. Each form starts `starts` times. `streams` run when a process is killed.
    """

    starts: int
    rounds: int
    round_s: float
    warm_s: float
    side_by_side: int
    answer: int
    streams: int


FULL = Setup(starts=5, rounds=8, round_s=2.0, warm_s=0.5, side_by_side=64, answer=101, streams=60)
QUICK = Setup(starts=1, rounds=1, round_s=0.5, warm_s=0.5, side_by_side=16, answer=101, streams=12)


@dataclass(frozen=True)
class Form:
    """A way to run routers: so many of so many processes each."""

    routers: int
    processes: int = 1

    @property
    def name(self) -> str:
        """Return the name that the table has."""
        if self.processes > 1:
            return f"{self.processes} processes, one port"
        return f"{self.routers} routers" if self.routers > 1 else "1 router"


ONE, THREE_PROCESSES, THREE_ROUTERS = Form(1), Form(1, 3), Form(3)
TWO_PROCESSES, TWO_ROUTERS = Form(1, 2), Form(2)


@dataclass(frozen=True)
class Running:
    """A running form: its cluster, and its processes by name."""

    form: Form
    cluster: LocalCluster

    @property
    def heads(self) -> list[str]:
        """Return the names of the processes that the cluster has started."""
        return [name for name in self.cluster.processes if name.startswith("router-")]

    def pids(self) -> dict[str, int]:
        """Return its processes; those of one port below their supervisor."""
        heads = {name: self.cluster.processes[name].pid for name in self.heads}
        if self.form.processes == 1:
            return heads
        (supervisor,) = heads.values()
        return {f"router {at}": pid for at, pid in enumerate(children_of(supervisor), 1)} | {"supervisor": supervisor}

    def mib(self) -> tuple[float, float]:
        """Return the resident and the proportional memory in MiB, of which shared pages count in parts."""
        sizes = [memory_mib(pid) for pid in self.pids().values()]
        return sum(rss for rss, _ in sizes), sum(pss for _, pss in sizes)

    async def restart(self) -> float:
        """Kill all at once and start them again; return the seconds until all listen."""
        for name in self.heads:
            self.cluster.kill(name)
        await asyncio.gather(*(self.cluster.processes[name].exited for name in self.heads))
        began = time.perf_counter()
        await asyncio.gather(*(self.cluster.restart(name) for name in self.heads))
        seconds = time.perf_counter() - began
        await self.cluster.wait_serving()
        return seconds


def memory_mib(pid: int) -> tuple[float, float]:
    """Return a process's resident and proportional memory in MiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Rss"].split()[0]) / 1024, int(fields["Pss"].split()[0]) / 1024


def main() -> None:
    """Run the benchmark with the command line's arguments; `--write-docs` writes its tables of the page."""
    run_command("router_forms", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick), PAGE)


def measure(setup: Setup, quick: bool) -> Report:
    """Measure the forms."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows, ratios = runner.run(_measure(setup))
    return Report(
        name="router_forms",
        command="python -m bench.router_forms" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup),
        rows=rows,
        ratios=ratios,
        aims=AIMS,
    )


async def _measure(setup: Setup) -> tuple[list[dict[str, Any]], dict[str, float]]:
    rows: dict[Form, dict[str, Any]] = {}
    for form in (ONE, THREE_PROCESSES, THREE_ROUTERS):
        progress(form.name)
        async with _running(form, setup) as running:
            ready_s = median([await running.restart() for _ in range(setup.starts)])
            async with _channels(running, setup.side_by_side) as channels:
                flow = await _calls(channels, 1, running, setup)
                rss, pss = running.mib()
            lost = {"lost with a process": await _lost(running, setup, pod=False)}
            if form.processes > 1:
                lost["lost with the pod"] = await _lost(running, setup, pod=True)
        sizes = {"RSS MiB": rss, "PSS MiB": pss, "ready s": ready_s}
        rows[form] = {"form": form.name, "calls": flow.calls} | sizes | lost
    flows = await _in_turns(setup)
    costs = {form: costs_of(of, setup) for form, of in flows.items()}
    ratios = {
        f"processes_over_routers_us_a_{unit}": costs[TWO_PROCESSES][unit] / costs[TWO_ROUTERS][unit]
        for unit in ("call", "token")
    }
    ratios["processes_over_routers_memory"] = rows[THREE_PROCESSES]["PSS MiB"] / rows[THREE_ROUTERS]["PSS MiB"]
    of_costs = [
        {"form": form.name, "calls": sum(flow.calls for flow in flows[form])}
        | {f"us/{unit}": value for unit, value in of.items()}
        for form, of in costs.items()
    ]
    return [*rows.values(), *of_costs], ratios


def costs_of(flows: Sequence[Flow], setup: Setup) -> dict[str, float]:
    """Return the processor time in microseconds of all router processes, for a call and for each further token."""
    short, long = (sum(flow.processor_s.values()) / flow.calls * 1e6 for flow in flows)
    return {"call": short, "token": (long - short) / (setup.answer - 1)}


async def _in_turns(setup: Setup) -> Mapping[Form, Sequence[Flow]]:
    """Return the flows of one token and of `setup.answer` tokens of two processes and of two routers, in turns."""
    flows: dict[tuple[Form, int], Flow] = {}
    async with AsyncExitStack() as stack:
        forms = {form: await stack.enter_async_context(_running(form, setup)) for form in (TWO_PROCESSES, TWO_ROUTERS)}
        channels = {
            form: await stack.enter_async_context(_channels(running, setup.side_by_side))
            for form, running in forms.items()
        }
        for number in range(setup.rounds):
            progress(f"round {number + 1} of {setup.rounds}, of two processes and two routers")
            for form in (*forms,) if number % 2 else reversed((*forms,)):
                for answer in (1, setup.answer):
                    flow = await _calls(channels[form], answer, forms[form], setup)
                    flows[form, answer] = flows[form, answer] + flow if (form, answer) in flows else flow
    return {form: [flows[form, answer] for answer in (1, setup.answer)] for form in forms}


async def _calls(channels: Sequence[grpc.aio.Channel], answer: int, running: Running, setup: Setup) -> Flow:
    return await Calls(channels, PROMPT, answer).flow(setup.side_by_side, setup.warm_s, setup.round_s, running.pids())


async def _lost(running: Running, setup: Setup, *, pod: bool) -> float:
    """Kill a router process, or with `pod` all that stand and fall together; return the share of streams that break."""
    async with _channels(running, setup.streams) as channels:
        calls = Calls(channels, PROMPT, 200)
        ends = [asyncio.create_task(calls.end("t")) for _ in range(setup.streams)]
        await asyncio.sleep(0.5)  # all have begun, and their answers take longer
        if pod or running.form.processes == 1:
            running.cluster.kill(running.heads[0])
        else:
            os.kill(running.pids()["router 1"], signal.SIGKILL)
        return sum(end != "OK" for end in await asyncio.gather(*ends)) / setup.streams


@asynccontextmanager
async def _channels(running: Running, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    """Open so many connections, to the routers in turn."""
    async with AsyncExitStack() as stack:
        addresses = running.cluster.routers
        channels = [await stack.enter_async_context(own_channel(addresses[at % len(addresses)])) for at in range(count)]
        await asyncio.gather(*(_served(channel) for channel in channels))
        yield channels


async def _served(channel: grpc.aio.Channel) -> None:
    """Wait until the process of a connection, which may have started just now, answers."""
    calls = Calls([channel], PROMPT)
    while await calls.end("t") != "OK":  # noqa: ASYNC110  # calls are the only way to tell
        await asyncio.sleep(0.05)


@asynccontextmanager
async def _running(form: Form, setup: Setup) -> AsyncIterator[Running]:
    """Run a cluster with routers in a form."""
    rows = 2 * setup.side_by_side
    flags = ("--rows", str(rows), "--kv-blocks", str(32 * rows), "--step-tokens", "4096")
    settings = ClusterSettings(
        MODEL, port=0, store_port=0, routers=form.routers, worker_flags=flags,
        router_flags=("--processes", str(form.processes)),
    )  # fmt: skip
    async with serving_cluster(settings) as cluster:
        yield Running(form, cluster)


if __name__ == "__main__":
    main()
