"""A process that lacks the processor is told from one that hangs: real processes on one core."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loraplex.worker.io.engine_client import Starvation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells what a thread waits for")
_SPINS = "while True: pass"
# A thread that computes, for another one that waits.
_WAITS = f"import threading; threading.Thread(target=exec, args=({_SPINS!r},)).start()"


@contextmanager
def process(code: str = _SPINS) -> Iterator[int]:
    """Run a process on one core; return its id."""
    core = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\n{code}"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        try:
            yield running.pid
        finally:
            running.kill()


def processor_s(pid: int) -> float:
    """Return the processor time in seconds that a process's threads have used."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def silences_of(pid: int) -> tuple[float, float, float]:
    """Return the least and most seconds that a process may count as silent, and the processor time that it used then.

    This process may be kept from the processor between any two of its lines.
    """
    starvation = Starvation(pid)
    before = time.monotonic()
    starvation.look()
    after, used = time.monotonic(), processor_s(pid)
    while processor_s(pid) - used < 0.2:
        time.sleep(0.02)
        starvation.look()
    used, least = processor_s(pid) - used, time.monotonic() - after
    starvation.look()
    return least - starvation.seconds, time.monotonic() - before - starvation.seconds, used


@pytest.mark.parametrize("code", [_SPINS, _WAITS])
def test_beside_busy_processes_its_processor_time_alone_counts(code: str) -> None:
    with process(code) as pid, process(), process():
        while processor_s(pid) < 0.1:
            time.sleep(0.01)
        least, most, used = silences_of(pid)
        assert least - 0.1 < used < most + 0.1


def wait_for_state(pid: int, state: str) -> None:
    """Return when a process sleeps ("S") or is stopped ("T")."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        time.sleep(0.01)


@pytest.mark.parametrize("stops", [False, True])
def test_one_that_sleeps_or_is_stopped_hangs(stops: bool) -> None:
    with process(_SPINS if stops else "import sys; sys.stdin.read()") as pid:
        if stops:
            os.kill(pid, signal.SIGSTOP)
        wait_for_state(pid, "T" if stops else "S")
        starvation = Starvation(pid)
        for _ in range(5):
            starvation.look()
            time.sleep(0.02)
        assert starvation.seconds == 0
