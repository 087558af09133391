"""Runs the load tests of examples/loadtest on the shipped model, and makes the pictures of docs/plots.

    python -m bench.pictures [--quick]       --quick: short runs that show that it works; not the pictures to keep

The plots are the load tester's own; the screenshots are its report's, wide, dark and narrow; `loadtest-top.svg` is
`loraplex top` while the last of them runs, and `page*.png` are the gateway's page. Needs a Chromium on PATH.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from bench.devtools import browser_page
from bench.local_cluster import serving_cluster
from bench.page_pictures import draw_page
from bench.report import progress
from bench.screenshots import NoBrowserError, find_browser
from loraplex.cli.adapters_top import AdapterNames
from loraplex.cli.cluster import ClusterReader, Interval
from loraplex.cli.cluster_top import REFRESH_S, Rates, names_on_devices, view
from loraplex.cli.local import ClusterSettings
from loraplex.cli.options import TENANT
from loraplex.cli.upload_tree import find_adapters
from loraplex.loadtest.charts import Axis, Series, line_chart
from loraplex.loadtest.report import draw_svg, svg_file
from loraplex_client import AsyncStoreClient

_ROOT = Path(__file__).parents[1]
PLOTS = _ROOT / "docs" / "plots"
EXAMPLES = _ROOT / "examples"
# Maximum bytes of a picture in docs/plots.
MOST_BYTES = 300_000
# Delay in seconds of the picture of `loraplex top` after its load test began, so that the table shows a busy cluster,
# minimum number of looks at the cluster whose rates it shows, and width of its terminal in characters.
_TOP_S = 2.0
_LOOKS = 12
_COLUMNS = 112
# A tenant of the load test, as which the names of adapters are asked for.
_TENANT = "acme"


@dataclass(frozen=True)
class Experiment:
    """A load-test file and its plots to keep, as (name in the report, name in docs/plots)."""

    file: str
    plots: Sequence[tuple[str, str]] = ()
    quick: Sequence[str] = ()
    flags: Sequence[str] = ()
    # Name of its report's directory; empty for the file's own name.
    name: str = ""


EXPERIMENTS = (
    Experiment(
        "throughput.toml",
        (
            ("sweep-latency-against-throughput", "latency-against-throughput"),
            ("sweep-time-per-token-and-throughput-over-requests-at-once", "time-per-token"),
        ),
        ("--duration", "1"),
    ),
    Experiment("one-stream.toml", (("run-1-one-stream", "one-stream"),)),
    Experiment("three-streams.toml", (("run-1-the-first-streams", "three-streams"),)),
    Experiment("three-adapters.toml", (("run-1-the-first-streams", "three-adapters"),)),
    Experiment("one-stream.toml", flags=("--answer-tokens", "990"), name="long-stream"),
    Experiment("without-cache.toml"),
)
_SHOWN = Experiment("tenants.toml", quick=("--duration", "12"))


def main() -> int:
    """Make all pictures; return exit code 0, or 2 without a browser."""
    parser = argparse.ArgumentParser(prog="python -m bench.pictures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="short runs that show that it works; not the pictures to keep"
    )
    quick = parser.parse_args().quick
    try:
        browser = find_browser()
        with tempfile.TemporaryDirectory(prefix="loraplex-pictures-") as directory:
            asyncio.run(_make(browser, Path(directory), quick=quick))
    except NoBrowserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


async def _make(browser: str, directory: Path, *, quick: bool) -> None:
    PLOTS.mkdir(parents=True, exist_ok=True)
    model = str(EXAMPLES / "model")
    # A relative path in the command, so that the report shows a command that works on any machine.
    (directory / "examples").symlink_to(EXAMPLES)
    # Without the flag, the worker would have the host's name.
    settings = ClusterSettings(model, port=0, store_port=0, http_port=0, worker_flags=("--worker-id", "worker-1"))
    async with serving_cluster(settings) as cluster:
        for adapter in find_adapters(EXAMPLES / "adapters").adapters:
            async with AsyncStoreClient(cluster.store, adapter.tenant) as store:
                await store.push(adapter.directory, adapter.name)
        for experiment in EXPERIMENTS:
            await _run(experiment, cluster.router, directory, quick=quick)
            for plot, kept in experiment.plots:
                shutil.copyfile(_out(directory, experiment) / "plots" / f"{plot}.svg", PLOTS / f"loadtest-{kept}.svg")
        _compare_caches(directory)
        running = asyncio.create_task(_run(_SHOWN, cluster.router, directory, quick=quick))
        await asyncio.sleep(_TOP_S)
        await asyncio.gather(
            asyncio.to_thread(_show_top, cluster.router, cluster.store), draw_page(browser, cluster.http, PLOTS)
        )
        await running
    await _draw(browser, directory)


async def _run(experiment: Experiment, router: str, directory: Path, *, quick: bool) -> None:
    """Run the load test as a user does. Raises RuntimeError if it fails."""
    progress(f"loraplex loadtest examples/loadtest/{experiment.file}")
    flags = [f"examples/loadtest/{experiment.file}", "--router", router, "--out", _out(directory, experiment).name]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loraplex.cli", "loadtest", *flags, *experiment.flags,
        *(experiment.quick if quick else ()),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, cwd=directory,
    )  # fmt: skip
    _, stderr = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{experiment.file}: {stderr.decode()}")


def _out(directory: Path, experiment: Experiment) -> Path:
    return directory / (experiment.name or Path(experiment.file).stem)


def _compare_caches(directory: Path) -> None:
    """Draw the time of a token over the tokens before it: for a stream, and for requests that compute all of them."""
    with (directory / "without-cache" / "requests.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "OK"]
    without = [(float(row["prompt_tokens"]), (float(row["first_s"]) - float(row["sent_s"])) * 1e3) for row in rows]
    (run,) = json.loads((directory / "long-stream" / "report.json").read_text())["runs"]
    times, tokens = run["streams"][0]["messages_s"], run["figures"]["tokens"]
    # A message may have several tokens if the machine is busy.
    each = tokens / len(times)
    cached = [(8 + at * each, (later - earlier) / each * 1e3) for at, (earlier, later) in enumerate(pairwise(times))]
    chart = line_chart(
        Axis("tokens before it"),
        Axis("milliseconds for a token"),
        [Series("without a cache", without), Series("with it", cached)],
    )
    (PLOTS / "loadtest-kv-cache.svg").write_text(svg_file(draw_svg(chart)), encoding="utf-8")


def _show_top(router: str, store: str) -> None:
    """Draw the page that `loraplex top` shows in a terminal."""
    reader, rates = ClusterReader(router, TENANT), Rates()
    now = reader.look()
    for looks in range(2 * _LOOKS):
        time.sleep(REFRESH_S)
        before, now = now, reader.look()
        interval = Interval(now, before)
        rates.add(interval)
        busy = any(worker["rows_running"] for worker in now.workers) and interval.requests().get("OK")
        if looks >= _LOOKS and busy:  # no pause of the load
            break
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    on_devices = names_on_devices(now, AdapterNames(store, _TENANT))
    console.print(view(router, interval, on_devices, rates, _COLUMNS))
    picture = console.export_svg(title="loraplex top")
    (PLOTS / "loadtest-top.svg").write_text(picture, encoding="utf-8")


async def _draw(browser: str, directory: Path) -> None:
    """Draw the report of the last load test."""
    async with browser_page(browser) as page:
        await page.open((_out(directory, _SHOWN) / "report.html").resolve().as_uri())
        for name, width, dark in (("report", 1280, False), ("report-dark", 1280, True), ("report-narrow", 430, False)):
            picture = PLOTS / f"loadtest-{name}.png"
            await page.save(picture, width=width, dark=dark, most=0 if name == "report" else 2400)
            if picture.stat().st_size > MOST_BYTES:
                raise NoBrowserError(f"{picture} has {picture.stat().st_size:,} bytes; at most {MOST_BYTES:,} are kept")


if __name__ == "__main__":
    sys.exit(main())
