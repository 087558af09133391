"""The time that a process waits for the processor: a machine with other work, or a container's CPU limit, is slow.

Linux tells it of every thread: one that is runnable and does not run lacks the processor, and so does one that waits
for a disk now and then. A thread that is stopped or sleeps waits for something else, as one does that hangs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

# States of a thread that runs or waits for the processor, and of one that waits for a disk, perhaps for swapped memory.
_RUNNABLE, _WAITS_FOR_DISK = "R", "D"
# Maximum time in seconds that a process waits for a disk between two moments on the processor; beyond, the disk hangs.
_DISK_S = 1.0


class Starvation:
    """The time that a process and its children lacked the processor. Elsewhere than on Linux it counts none."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.reset()

    def reset(self) -> None:
        """Count from the next look on: the process has just done something."""
        self._looked_at = self._used_at = time.monotonic()
        self._used: dict[int, float] | None = None
        # Seconds that the looks have counted.
        self.seconds = 0.0

    def look(self) -> None:
        """Count the time since the last look, less what the busiest thread used of it."""
        now, former, threads = time.monotonic(), self._used, list(_threads(self._pid))
        self._used = {thread: used for thread, _, used in threads}
        if former is not None:
            used = max((used - former.get(thread, used) for thread, _, used in threads), default=0.0)
            if used > 0:
                self._used_at = now
            states = {state for _, state, _ in threads}
            if _RUNNABLE in states or (_WAITS_FOR_DISK in states and now - self._used_at < _DISK_S):
                self.seconds += max(0.0, now - self._looked_at - used)
        self._looked_at = now


def _threads(pid: int) -> Iterator[tuple[int, str, float]]:
    """Yield number, state and processor time in seconds of each thread of a process and its children."""
    with contextlib.suppress(OSError):  # it has ended, or this is no Linux
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                state = (task / "stat").read_text().rpartition(")")[2].split(maxsplit=1)[0]
                yield int(task.name), state, int((task / "schedstat").read_text().split()[0]) / 1e9
                for child in (task / "children").read_text().split():
                    yield from _threads(int(child))
