"""`loraplex loadtest` against real clusters: every request is accounted for, whatever happens to the cluster."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from loraplex.loadtest.plan import load_toml, read_plan
from loraplex.loadtest.workload import LoadRequest, Workload
from tests.e2e.conftest import Cluster, running_cluster, write_hash_adapters

pytestmark = pytest.mark.asyncio(loop_scope="module")
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
STEP_S = 0.01
MODEL = f"hash:?seed=1&step_ms={STEP_S * 1000:g}"

MIXED = """
name = "mixed"
seed = 7
requests = 110
warm_up_requests = 10
processes = 2
slo = ["latency<60s"]
prompt_tokens = {kind = "uniform", low = 3, high = 40}
answer_tokens = {kind = "uniform", low = 6, high = 12}
arrivals = {kind = "gamma", rate_per_s = 60, cv = 1.5}
[[tenants]]
name = "acme"
weight = 3
adapters = {kind = "power_law", exponent = 1, names = ["a", "b", "c", "nobody"]}
cancel = {share = 0.3, after_tokens = {kind = "uniform", low = 1, high = 4}}
[[tenants]]
name = "globex"
prompts = ["hello"]
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Run a cluster with one worker and the adapters a, b and c."""
    directory = tmp_path_factory.mktemp("loadtest")
    adapters = write_hash_adapters(directory / "adapters")
    async with running_cluster(directory / "cluster", MODEL, adapters) as running:
        yield running


async def start(*arguments: str) -> asyncio.subprocess.Process:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loraplex.cli", "loadtest", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environ,
    )  # fmt: skip


async def finish(process: asyncio.subprocess.Process, out: Path) -> tuple[int | None, str, dict[str, Any]]:
    """Exit code, stderr, and the report."""
    async with asyncio.timeout(100):
        _, stderr = await process.communicate()
    assert (out / "report.html").stat().st_size > 10_000, stderr.decode()
    return process.returncode, stderr.decode(), json.loads((out / "report.json").read_text())


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "requests.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def expected_status(workload: Workload, request: LoadRequest) -> str:
    if request.adapter is not None and workload.adapters[request.adapter][1] == "nobody":
        return "NOT_FOUND"
    return "OK" if request.cancel_after is None else "CANCELLED_BY_CLIENT"


async def test_every_request_ends_as_its_draw_says_and_no_sooner_than_the_model_can(
    cluster: Cluster, tmp_path: Path, eventually: Eventually
) -> None:
    file, out = tmp_path / "mixed.toml", tmp_path / "out"
    file.write_text(MIXED)
    workload = Workload(read_plan(load_toml(file), "mixed", tmp_path))
    drawn = [workload.request(index) for index in range(120)]
    process = await start(str(file), "--router", cluster.local.router, "--out", str(out))
    code, stderr, report = await finish(process, out)
    assert code == 0, stderr
    await eventually(cluster.idle)  # what was cancelled holds nothing any more
    (run,) = report["runs"]
    rows = rows_of(out)
    assert [int(row["index"]) for row in rows] == list(range(120))
    statuses = [expected_status(workload, request) for request in drawn]
    assert [row["status"] for row in rows] == statuses
    assert set(statuses) == {"OK", "NOT_FOUND", "CANCELLED_BY_CLIENT"}
    assert run["statuses"] == dict(Counter(statuses[10:]).most_common())
    assert run["accounting"] == {"sent": 120, "warm_up": 10, "measured": 110, "never_sent": 0}
    for row, request in zip(rows, drawn, strict=True):
        if row["status"] == "OK":
            assert int(row["tokens"]) == request.answer_tokens
            assert int(row["prompt_tokens"]) == (5 if request.prompt else request.prompt_tokens)
            # one step makes one token of a row, and takes so long
            assert float(row["first_s"]) - float(row["intended_s"]) >= 0.99 * STEP_S
            assert float(row["end_s"]) - float(row["intended_s"]) >= 0.99 * STEP_S * request.answer_tokens
        elif row["status"] == "CANCELLED_BY_CLIENT":
            assert request.cancel_after is not None
            assert int(row["tokens"]) >= request.cancel_after
    counted = rows[10:]
    answered = [row for row in counted if row["status"] == "OK"]
    for name, count in (
        ("ttft", sum(int(row["messages"]) > 0 for row in counted)),
        ("itl", sum(max(0, int(row["messages"]) - 1) for row in counted)),
        ("latency", len(answered)),
    ):
        assert sum(run["histograms"][name]["counts"]) == run["times"][name]["count"] == count > 0
    # nothing below the shortest answer's bucket: 6 steps
    assert run["histograms"]["latency"]["bounds_s"][1] >= 6 * STEP_S
    assert run["times"]["latency"]["min"] >= 0.99 * 6 * STEP_S
    assert run["times"]["ttft"]["min"] >= 0.99 * STEP_S
    assert run["figures"]["goodput_share"] == len(answered) / 110
    assert run["figures"]["cold"] >= 1  # an adapter's first request waited for its bytes
    assert [tenant["figures"]["requests"] for tenant in run["tenants"]] == [
        sum(request.tenant == number for request in drawn[10:]) for number in (0, 1)
    ]
    assert run["generator"]["processes"] == 2
    assert run["generator"]["cpu_s"] > 0


async def test_ctrl_c_ends_the_run_with_its_report(cluster: Cluster, tmp_path: Path, eventually: Eventually) -> None:
    out = tmp_path / "out"
    process = await start(
        "--concurrency", "3", "--requests", "5", "--answer-tokens", "20000",
        "--router", cluster.local.router, "--out", str(out),
    )  # fmt: skip

    async def running() -> bool:
        return bool(sum(worker.rows_running for worker in await cluster.workers()) == 3)

    await eventually(running)
    process.send_signal(signal.SIGINT)
    code, _, report = await finish(process, out)
    assert code == 130
    (run,) = report["runs"]
    assert run["statuses"] == {"STOPPED": 3}
    assert run["accounting"]["never_sent"] == 2
    assert run["times"]["itl"]["count"] > 0
    await eventually(cluster.idle)


async def test_a_cluster_that_dies_ends_the_run_with_the_errors_counted(
    cluster: Cluster, tmp_path: Path, eventually: Eventually
) -> None:
    out = tmp_path / "out"
    flags = ("--rate", "20", "--requests", "2000", "--answer-tokens", "10", "--slo", "ttft<1s")
    process = await start(*flags, "--router", cluster.local.router, "--out", str(out))

    async def busy() -> bool:
        return any(worker.rows_running for worker in await cluster.workers())

    await eventually(busy)
    cluster.local.kill("router-1")
    code, stderr, report = await finish(process, out)
    await cluster.local.restart("router-1")
    await cluster.local.wait_serving()
    assert code == 1
    assert "nothing answered any more" in stderr.splitlines()[-1]
    (run,) = report["runs"]
    assert run["statuses"]["UNAVAILABLE"] > 0
    assert sum(run["statuses"].values()) == run["accounting"]["measured"] == len(rows_of(out))
    assert run["accounting"]["measured"] + run["accounting"]["never_sent"] == 2000
    assert run["accounting"]["never_sent"] > 0
    assert "Ended early: nothing answered any more" in (out / "report.html").read_text()
