"""Several hosts: two routers, two workers, Redis and the store, each in a network namespace, and cables taken out."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos import hosts
from tests.chaos.checker import check
from tests.chaos.history import read_history
from tests.chaos.report import as_lines


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
async def test_links_cut_for_five_seconds_cost_no_token(tmp_path: Path) -> None:
    why_not = await asyncio.to_thread(hosts.refusal)
    if why_not:
        pytest.skip(f"network namespaces can't be made here: {why_not}")
    history = tmp_path / "history.jsonl"
    command = (*hosts.UNSHARE, sys.executable, "-m", "tests.chaos.hosts", str(tmp_path), str(history))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(120):
            output, _ = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()  # and with it all that it has started
    assert process.returncode == 0, output.decode()
    verdict = check(read_history(history))
    print("\n".join(as_lines(verdict)))
    assert verdict.holds, verdict.findings
    assert verdict.faults["cable_cut"] == 2
    assert verdict.completed >= 48
