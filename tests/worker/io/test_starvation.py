"""A process that lacks the processor is told from one that hangs: real processes on one core."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.throttled import processor_s
from worker.io.starvation import Starvation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells what a thread waits for")
_SPINS = "while True: pass"
# A thread that computes, for another one that waits.
_WAITS = f"import threading; threading.Thread(target=exec, args=({_SPINS!r},)).start()"


@contextmanager
def process(code: str = _SPINS) -> Iterator[int]:
    """Run a process on one core; return its id."""
    core = min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\n{code}"]) as running:
        try:
            yield running.pid
        finally:
            running.kill()


def silence_of(pid: int, processor: float) -> float:
    """Return how long a process counts as silent until it has used so much processor time since now."""
    starvation = Starvation(pid)
    starvation.look()
    began, used = time.monotonic(), processor_s([pid])
    while processor_s([pid]) - used < processor:
        time.sleep(0.02)
        starvation.look()
    return time.monotonic() - began - starvation.seconds


@pytest.mark.parametrize("code", [_SPINS, _WAITS])
def test_beside_busy_processes_its_processor_time_alone_counts(code: str) -> None:
    with process(code) as pid, process(), process():
        while processor_s([pid]) < 0.1:
            time.sleep(0.01)
        assert silence_of(pid, 0.2) == pytest.approx(0.2, abs=0.1)


@pytest.mark.parametrize("code", ["import time; time.sleep(600)", _SPINS])
def test_one_that_sleeps_or_is_stopped_hangs(code: str) -> None:
    with process(code) as pid:
        while processor_s([pid]) < 0.02:
            time.sleep(0.01)
        if code == _SPINS:
            os.kill(pid, signal.SIGSTOP)
            os.waitpid(pid, os.WUNTRACED)
        starvation = Starvation(pid)
        for _ in range(5):
            starvation.look()
            time.sleep(0.02)
        assert starvation.seconds == 0
