"""The states of processes as Linux reports them, to prove what a signal did."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def runs_under(parent: int, pid: int) -> bool:
    """Tell whether a process runs and is that parent's: its number may belong to another by now."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in {"Z", "X", "T"} and int(fields[1]) == parent


def stopped(pid: int) -> bool:
    """Tell whether a process is stopped."""
    return _stat(pid)[:1] in (["T"], ["t"])


def gone(pid: int) -> bool:
    """Tell whether a process has ended."""
    return _stat(pid)[:1] in ([], ["Z"], ["X"])


def signal_process(pid: int, number: signal.Signals) -> bool:
    """Signal a process; False where it has ended."""
    if gone(pid):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def killed(code: int) -> bool:
    """Tell whether a process ended by SIGKILL, and not of itself just before."""
    return code == -signal.SIGKILL


def _stat(pid: int) -> list[str]:
    """State, parent and so on; empty: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
