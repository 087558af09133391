"""Test the figures that `loraplex top` computes from two looks at a cluster, and their display."""

from __future__ import annotations

import dataclasses
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from loraplex.cli import terminal
from loraplex.cli.__main__ import app
from loraplex.cli.adapters_top import view as adapters_view
from loraplex.cli.cluster import Interval, Snapshot
from loraplex.cli.cluster_top import Rates, sparkline, view
from loraplex.cluster.v1 import cluster_pb2 as pb

TABLES = {terminal.print_rows, terminal.print_fields, terminal.table_of}
BOUNDS = (0.1, 0.2, 0.4)


def spread(*counts: int) -> pb.Distribution:
    return pb.Distribution(bounds=BOUNDS, counts=counts)


def look(
    uptime: float, ok: int, tokens: int, counts: tuple[int, ...], steps: int = 0, incarnation: str = "x"
) -> Snapshot:
    worker = pb.Worker(
        worker_id="w-1",
        incarnation=incarnation,
        phase=pb.WORKER_PHASE_SERVING,
        model="tiny",
        rows_running=3,
        rows_limit=4,
        blocks=pb.Blocks(total=10, free=5, referenced=5),
        adapter_slots=pb.AdapterSlots(total=8, used=2),
        steps=steps,
    )
    traffic = pb.GetTrafficResponse(
        uptime=uptime,
        open=3,
        requests={"OK": ok, "NOT_FOUND": 2},
        completion_tokens=tokens,
        time_to_first_token=spread(*counts),
        adapters=[
            pb.AdapterTraffic(
                tenant="acme", adapter="acme/a", requests=ok, completion_tokens=tokens, time_to_first_token=ok
            ),
            pb.AdapterTraffic(tenant="acme", requests=1, completion_tokens=1, time_to_first_token=0.5),
        ],
    )  # fmt: skip
    return Snapshot([terminal.message_values(worker)], [{"model": "tiny", "waiting": 7, "running": 3}], traffic)


def text_of(interval: Interval) -> str:
    console = Console(file=io.StringIO(), width=140, force_terminal=False)
    console.print(view("here:1", interval))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_two_looks_give_rates_and_latencies_of_the_time_between() -> None:
    interval = Interval(look(12.0, 60, 500, (5, 13, 2, 0), steps=250), look(10.0, 40, 300, (5, 3, 2, 0), steps=50))
    assert not interval.since_start
    assert interval.seconds == 2.0
    assert interval.requests() == {"OK": 20, "NOT_FOUND": 0}
    assert interval.count("completion_tokens") == 200
    # ten values, all in the second bucket
    assert interval.quantile("time_to_first_token", 0.5) == pytest.approx(0.15)
    assert interval.quantile("time_to_first_token", 1.0) == pytest.approx(0.2)
    assert interval.quantile("queue_time", 0.5) is None
    assert interval.steps_per_s(interval.now.workers[0]) == 100
    busiest, idle = interval.adapters()
    assert (busiest["requests"], busiest["tokens"], busiest["ttft_s"]) == (20, 200, 1.0)
    assert (idle["requests"], idle["ttft_s"], idle["all_requests"]) == (0, None, 1)


def test_one_look_and_a_router_that_started_again_count_from_its_start() -> None:
    for before in (None, look(100.0, 900, 900, (9, 9, 9, 9), steps=900)):
        interval = Interval(look(10.0, 40, 300, (0, 0, 0, 4)), before)
        assert interval.since_start
        assert (interval.seconds, interval.count("completion_tokens")) == (10.0, 300)
        assert interval.requests() == {"OK": 40, "NOT_FOUND": 2}
        # nobody knows how far beyond the last bound
        assert interval.quantile("time_to_first_token", 0.5) == BOUNDS[-1]
        assert interval.steps_per_s(interval.now.workers[0]) is None


def test_an_engine_that_started_again_has_no_rate_yet() -> None:
    interval = Interval(look(12.0, 1, 1, (1, 0, 0, 0), 5, "y"), look(10.0, 1, 1, (1, 0, 0, 0), 500, "x"))
    assert interval.steps_per_s(interval.now.workers[0]) is None


def test_the_view_has_all_of_it() -> None:
    shown = text_of(Interval(look(12.0, 60, 500, (5, 13, 2, 0), 250), look(10.0, 40, 300, (5, 3, 2, 0), 50)))
    for part in ("router here:1", "10.0 requests/s", "100 tokens/s", "█████████░░░ 3/4", "██████░░░░░░ 50%", "acme/a"):
        assert part in shown
    assert "since its start" not in shown
    assert "NOT_FOUND" not in shown
    alone = text_of(Interval(look(10.0, 40, 300, (1, 0, 0, 0)), None))
    assert "since its start" in alone
    assert "0.2 NOT_FOUND/s" in alone


def test_sparklines_show_the_rates_of_the_last_looks() -> None:
    assert sparkline([0.0, 1.0, 4.0, 8.0]) == "▁▂▅█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    rates = Rates()
    looks = [look(10.0 + at, 40 + at * at, 300, (1, 0, 0, 0)) for at in range(4)]
    for before, now in zip([None, *looks], looks, strict=False):
        rates.add(Interval(now, before))
    assert dict(rates.lines()) == {"requests/s": "▂▅█", "tokens/s": "▁▁▁"}
    assert Rates().lines() == []


def test_80_columns_are_enough() -> None:
    now, before = look(12.0, 60, 500, (5, 13, 2, 0), 250), look(10.0, 40, 300, (5, 3, 2, 0), 50)
    name = "worker-of-a-host-1"
    worker = {**now.workers[0], "worker_id": name}
    interval, rates = Interval(dataclasses.replace(now, workers=[worker]), before), Rates()
    rates.add(Interval(now, before))
    many = ", ".join(f"acme/adapter-{number}" for number in range(99))
    sizes = {"device_bytes": 1234.5, "host_bytes": 9999.9, "disk_bytes": 999.5, "disk_bytes_limit": 1000.0}
    counts = {"loading": 0, "fetching": 0, "hits": 12345, "misses": 1234, "swaps": 99}
    counts |= {"disk_adapters": 512, "disk_hits": 999, "disk_misses": 999}
    full = {
        "worker_id": name,
        "adapter_slots": {"used": 12, "total": 16, "pinned": 1},
        "adapter_tiers": {**counts, **{field: mib * 2**20 for field, mib in sizes.items()}},
        "adapter_names": [many],
    }
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(view("here:1", interval, {name: [many]}, rates, 80))
    console.print(adapters_view([full]))
    assert isinstance(console.file, io.StringIO)
    shown = [line.split() for line in console.file.getvalue().splitlines()]
    assert max(map(len, console.file.getvalue().splitlines())) <= 80
    assert ["█", "requests/s", "█", "tokens/s"] in shown
    figures = ("3 open", "10.0 requests/s", "100 tokens/s", "0 prompt tokens/s", "0 workers lost", "0 redispatches")
    assert all(figure in console.file.getvalue() for figure in figures), "no line breaks in a figure"
    for heads in (
        "worker phase rows wait KV slots load steps/s",
        "tenant adapter req/s tok/s TTFT ms requests",
        "worker resident pinned loading hits misses swaps",
        "worker device MiB host MiB disk MiB",
        "worker fetching on disk disk hits disk misses",
    ):
        assert heads.split() in shown, console.file.getvalue()
    assert sum(name in line for line in shown) == 4, "whole, in each table"
    assert sum(f"{name}:" in line and line[-1].endswith("…") for line in shown) == 2


def test_a_terminal_of_24_lines_shows_as_many_adapters_as_fit() -> None:
    now = look(12.0, 60, 500, (5, 13, 2, 0), 250)
    rates = Rates()
    for number in range(30):
        now.traffic.adapters.add(tenant="acme", adapter=f"acme/a-{number}", requests=1)
        console = Console(file=io.StringIO(), width=80, height=24)
        rendered = console.render_lines(view("here:1", Interval(now, None), {"w-1": ["globex/a"]}, rates, 80, 24))
        lines = ["".join(segment.text for segment in line).split() for line in rendered]
        hidden = int(lines[-1][1]) if lines[-1][0] == "and" else 0
        shown = sum(line[:1] == ["acme"] for line in lines)
        assert (len(lines) <= 24, shown >= 4 or not hidden, shown + hidden) == (True, True, number + 3)


def test_the_whole_of_it_is_json() -> None:
    value: dict[str, Any] = look(10.0, 40, 300, (1, 2, 3, 4)).to_json()
    assert value["traffic"]["requests"] == {"OK": 40, "NOT_FOUND": 2}
    assert value["traffic"]["time_to_first_token"]["counts"] == [1, 2, 3, 4]
    assert value["traffic"]["adapters"][1]["adapter"] == ""
    assert value["workers"][0]["phase"] == "serving"
    assert value["queues"] == [{"model": "tiny", "waiting": 7, "running": 3}]


def called(function: Callable[..., Any], callees: dict[Any, None] | None = None) -> dict[Any, None]:
    """Return the functions of the command's modules that a function calls or passes on, directly or by others."""
    callees = {} if callees is None else callees
    for name in function.__code__.co_names:
        callee = function.__globals__.get(name)
        if inspect.isfunction(callee) and callee.__module__.startswith("loraplex.cli") and callee not in callees:
            callees[callee] = None
            called(callee, callees)
    return callees


def test_every_command_that_prints_a_table_has_json() -> None:
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    commands = [info.callback for group in groups if group for info in group.registered_commands if info.callback]
    tables = [command for command in map(inspect.unwrap, commands) if TABLES & set(called(command))]
    assert len(tables) >= 20
    # --json of quantize names a file.
    without = [one for one in tables if not {"as_json", "json_file"} & set(inspect.signature(one).parameters)]
    assert [one.__qualname__ for one in without] == []
