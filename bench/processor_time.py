"""Processor time of a cluster's processes, from /proc (Linux only)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

_PROC = Path("/proc")
# Indices in /proc/PID/stat after the name's closing bracket: parent, user time, system time.
_PARENT, _USER, _SYSTEM = 1, 11, 12
ENGINE = "worker's engine"
_ENGINE_MODULE = b"loraplex.worker.engine.process"


def processor_s(roots: Mapping[str, int]) -> dict[str, float]:
    """Return the seconds used so far by each process with its children, but for those of `roots` and workers' engines.

    The result is empty on a system without /proc.
    """
    if not (_PROC / "self" / "stat").exists():
        return {}
    table = {int(path.name): fields for path in _PROC.glob("[0-9]*") if (fields := _stat(path)) is not None}
    children: dict[int, list[int]] = {}
    for pid, fields in table.items():
        children.setdefault(int(fields[_PARENT]), []).append(pid)
    used: dict[str, float] = {}
    for name, root in roots.items():
        for pid in _tree(root, children, set(roots.values())):
            if pid in table:
                whose = ENGINE if pid != root and _ENGINE_MODULE in _command(pid) else name
                used[whose] = used.get(whose, 0.0) + _seconds(table[pid])
    return used


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process, in the order of their start."""
    return [int(word) for word in (_PROC / str(pid) / "task" / str(pid) / "children").read_text().split()]


def _tree(root: int, children: Mapping[int, Iterable[int]], others: Collection[int]) -> list[int]:
    """Return a process and those below it, without `others`; of this process, which starts the cluster's, it alone."""
    found = [root]
    for pid in found:  # The list grows in the loop.
        found += () if pid == os.getpid() else (child for child in children.get(pid, ()) if child not in others)
    return found


def _stat(path: Path) -> list[str] | None:
    try:
        return (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # The process has ended.
        return None


def _command(pid: int) -> bytes:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


def _seconds(fields: list[str]) -> float:
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")
