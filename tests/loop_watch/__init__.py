"""Reports of processes about how long they hold their event loops; tests.loop_watch.sitecustomize writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

# Maximum processor time in ms that a process may hold its event loop.
LIMIT_MS = 50.0


def environ(holds: Path, outer: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of processes that report to the directory `holds`."""
    path = [str(Path(__file__).parent), *filter(None, [outer.get("PYTHONPATH")])]
    return {"PYTHONPATH": ":".join(path), "LOOP_HOLDS": str(holds)}


def forget(holds: Path) -> None:
    """Empty the reports; the processes go on with them."""
    for report in holds.iterdir():
        report.write_text("")


def long_holds(holds: Path, limit_ms: float = LIMIT_MS) -> str:
    """Return the reports of longer holds than `limit_ms`, as lines."""
    lines = [json.loads(line) for report in holds.iterdir() for line in report.read_text().splitlines()]
    return "".join(
        f"{line['held_ms']} ms: {' '.join(line['argv'])}\n" + "".join(f"    {frame}\n" for frame in line["stack"][-8:])
        for line in lines
        if line["held_ms"] > limit_ms
    )
