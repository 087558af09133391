"""The processor time that benchmarks tell of each process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.processor_time import processor_s

LINUX = Path("/proc/self/stat").exists()


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
