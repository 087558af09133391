"""bench.relay for a moment: real processes, every table and ratio is there, processor time of every process."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.processor_time import processor_s
from bench.relay import AIMS, report, with_steps, without_steps
from bench.relay_load import Setup

LINUX = Path("/proc/self/stat").exists()


def test_every_case_and_ratio_is_there() -> None:
    setup = Setup(alone=5, probes=2, seconds=0.2, warm_s=0.1, few=4, many=8, tokens=200)
    written = report(setup, True, asyncio.run(without_steps(setup)), asyncio.run(with_steps(setup))).to_json()
    assert [row["case"] for row in written["rows"]] == [
        *("empty streaming call", "alone, no step", "beside 4 streams, 5 ms steps"),
        *("saturated, no step", "4 streams, 5 ms steps", "8 streams, 5 ms steps"),
    ]
    assert all(row["tokens/s"] > 0 for row in written["rows"] if "tokens/s" in row)
    assert written["ratios"].keys() == written["aims"].keys() == AIMS.keys()
    assert all(math.isfinite(value) for value in written["ratios"].values())
    if LINUX:
        rooms = {"client us/token", "router us/token", "worker us/token", "worker's engine us/token", "valkey us/token"}
        assert all(rooms <= row.keys() for row in written["rows"] if "tokens/s" in row)


@pytest.mark.skipif(not LINUX, reason="only Linux tells the time of other processes")
def test_a_process_counts_with_its_children() -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    used = processor_s({"child": process.pid, "self": os.getpid()})
    process.communicate(b"\n")
    assert used["child"] >= 0.25
    assert used["self"] > 0


def test_a_process_that_has_ended_counts_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert processor_s({"gone": process.pid}) == {}
