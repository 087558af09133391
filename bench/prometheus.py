"""A Prometheus of this machine that scrapes a local cluster."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.local_cluster import free_port, running

PROGRAM = "prometheus"
# Interval in seconds of scrapes, so that a run of minutes has lines.
SCRAPE_S = 2
# Word of the log line that says that it answers.
_READY = "Server is ready to receive web requests"
# Timeout in seconds of a query.
_QUERY_S = 30.0


@dataclass(frozen=True)
class Line:
    """A time series of an answer: its labels, and points of seconds since the epoch and values, without NaN."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


class Prometheus:
    """A running Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def lines(self, expression: str, start: float, end: float) -> list[Line]:
        """Return the answer of an expression over a time. Raises urllib.error.URLError where it is refused."""
        asked = {"query": expression, "start": start, "end": end, "step": SCRAPE_S}
        url = f"http://{self._address}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
        found = await asyncio.to_thread(_fetch, url)
        return [_line(series) for series in found["data"]["result"]]


@asynccontextmanager
async def scraping(targets: Mapping[str, str], directory: Path) -> AsyncIterator[Prometheus]:
    """Run Prometheus on metrics at addresses, by the names of their processes. Raises FileNotFoundError without it."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise FileNotFoundError(f"no {PROGRAM} is on PATH; it is no package of pip")
    config = directory / "prometheus.yml"
    config.write_text(yaml.safe_dump(_config(targets)))
    address = f"127.0.0.1:{free_port()}"
    flags = (f"--config.file={config}", f"--storage.tsdb.path={directory / 'tsdb'}", f"--web.listen-address={address}")
    async with running(PROGRAM, (program, *flags), _READY, directory / "prometheus.log"):
        yield Prometheus(address)


def _config(targets: Mapping[str, str]) -> dict[str, Any]:
    """Return a configuration whose jobs are the rooms, as in deploy/monitoring/prometheus.yml."""
    rooms = sorted({name.partition("-")[0] for name in targets})
    jobs = [
        {
            "job_name": room,
            "static_configs": [
                {"targets": [address], "labels": {"instance": name}}
                for name, address in targets.items()
                if name.partition("-")[0] == room
            ],
        }
        for room in rooms
    ]
    return {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": jobs}


def _fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=_QUERY_S) as answer:
        return json.load(answer)


def _line(series: Mapping[str, Any]) -> Line:
    points = [(float(at), float(value)) for at, value in series["values"]]
    return Line(series["metric"], [(at, value) for at, value in points if math.isfinite(value)])
