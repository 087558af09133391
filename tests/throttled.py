"""Throttles processes as a container's CPU limit does, without rights to set one.

In each period of 100 ms they get their share of processor time, all together, and stand still for the rest.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_PERIOD_S = 0.1
# Interval in seconds between looks at what they have used.
_LOOK_S = 0.002


def processor_s(pids: Sequence[int]) -> float:
    """Return the processor time in seconds that the threads of these processes have used."""
    threads = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


@contextlib.contextmanager
def throttled(pids: Sequence[int], share: float) -> Iterator[None]:
    """Give the processes this share of one core."""
    ended = threading.Event()

    def throttle() -> None:
        allowed_s, began = processor_s(pids), time.monotonic()
        for period in range(1, 1 << 40):
            allowed_s += share * _PERIOD_S
            _send(pids, signal.SIGCONT)
            until = began + period * _PERIOD_S
            while time.monotonic() < until and not ended.is_set():
                if processor_s(pids) >= allowed_s:
                    _send(pids, signal.SIGSTOP)
                    ended.wait(max(0.0, until - time.monotonic()))
                    break
                ended.wait(_LOOK_S)
            # What a period does not use is lost, as in Linux; what it used too much is not.
            allowed_s = min(allowed_s, processor_s(pids))
            if ended.is_set():
                break
        _send(pids, signal.SIGCONT)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
