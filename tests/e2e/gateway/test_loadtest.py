"""`loraplex loadtest --url` against the gateway: the answers of adapters are counted as over gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import TENANT, Cluster
from tests.e2e.gateway.conftest import Eventually

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_a_load_test_of_the_gateway(cluster: Cluster, eventually: Eventually, tmp_path: Path) -> None:
    flags = [
        "--concurrency",
        "2",
        "--requests",
        "12",
        "--prompt-tokens",
        "9",
        "--answer-tokens",
        "6",
        "--tenant",
        TENANT,
    ]
    flags += ["-a", "a", "-a", "nobody", "--url", f"http://{cluster.local.http}", "--api", "openai", "--json"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "clients.cli", "loadtest", *flags, "--out", str(tmp_path),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environ,
    )  # fmt: skip
    async with asyncio.timeout(60):
        stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    (run,) = json.loads(stdout)["runs"]
    assert set(run["statuses"]) == {"OK", "HTTP 404: model_not_found"}
    assert "nobody" in run["messages"]["HTTP 404: model_not_found"]
    figures = run["figures"]
    assert figures["ok"] > 0
    assert (figures["tokens"], figures["prompt_tokens"]) == (6 * figures["ok"], 9 * figures["ok"])
    assert run["times"]["itl"]["count"] > 0
    await eventually(cluster.idle)
