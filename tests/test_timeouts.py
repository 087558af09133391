"""A test that hangs ends by its timeout, its fixtures end what they started, and the report shows where it hung."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HANGING = """
import asyncio, subprocess, weakref
import pytest

PROXY = weakref.proxy(set())  # nothing is behind it: asking for its class raises

@pytest.fixture
async def child():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()
    print("the fixture ended its process")

async def wait_for_nothing():
    await asyncio.Event().wait()

async def test_hangs(child):
    async with asyncio.TaskGroup() as group:
        group.create_task(wait_for_nothing())

def test_goes_on():
    pass
"""


def test_a_hanging_test_ends_and_shows_its_stacks(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-p", "tests.task_stacks", "-p", "no:cacheprovider", "-c", "/dev/null"]
    options = ["--rootdir", str(tmp_path), "-o", "asyncio_mode=auto", "--timeout", "0.5", "--timeout-method", "signal"]
    root = Path(__file__).parents[1]
    ended = subprocess.run([*command, *options, str(tmp_path)], cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "1 failed, 1 passed" in ended.stdout
    assert "the fixture ended its process" in ended.stdout
    assert "in wait_for_nothing: await asyncio.Event().wait()" in ended.stdout
