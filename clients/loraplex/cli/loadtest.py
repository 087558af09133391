"""`loraplex loadtest`: loads a cluster as its clients do, and shows what they saw: progress, tables, comparisons."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

import typer

from loraplex.cli.options import ROUTER, TENANT, RouterOption, TenantOption, adapter_names
from loraplex.cli.service import explained
from loraplex.cli.terminal import (
    Columns,
    CommandError,
    err,
    print_error,
    print_json,
    print_table,
    print_warning,
    printable,
    table_of,
)

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from loraplex.loadtest.conditions import Condition
    from loraplex.loadtest.fleet import Target
    from loraplex.loadtest.generator import LoadProgress
    from loraplex.loadtest.plan import LoadPlan
    from loraplex.loadtest.runs import Done

T = TypeVar("T")
Repeated = list[str] | None
# Flags that a load-test file has as keys of the same name.
_KEYS = ("requests", "task", "texts", "prompt_tokens", "answer_tokens", "seed", "processes")


def loadtest(  # noqa: PLR0913, PLR0917  # one parameter a flag
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A load-test file (TOML). Flags override it.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="PER_S", help="Open loop: requests per second of a Poisson process.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, max=100_000, metavar="N", help="Closed loop: number of concurrent requests, at most 100,000."
        ),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, metavar="N", help="End after N requests.")] = None,
    duration: Annotated[float | None, typer.Option(metavar="S", help="End after S seconds.")] = None,
    adapter: Annotated[
        Repeated,
        typer.Option(
            "--adapter",
            "-a",
            metavar="NAME",
            help="Adapter to request. Repeatable: drawn uniformly.",
            autocompletion=adapter_names,
        ),
    ] = None,
    task: Annotated[
        Literal["generate", "embed", "classify"] | None,
        typer.Option(help="What the requests call; generate by default."),
    ] = None,
    texts: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of texts of each call of embed or classify; 1 by default."),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Length of each prompt or text; 64 by default.")
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Length of each answer; 64 by default.")
    ] = None,
    sweep: Annotated[
        str, typer.Option(metavar="N,N,...", help="One run for each of these concurrencies or rates.")
    ] = "",
    slo: Annotated[
        Repeated,
        typer.Option(metavar="SLO", help="Objective that a good request meets, such as ttft<500ms. Repeatable."),
    ] = None,
    fail_if: Annotated[
        Repeated,
        typer.Option(
            metavar="CONDITION", help="Exit with 1 if this holds in any run, such as ttft.p99>500ms or error_share>1%."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Random seed; the same seed gives the same requests.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, max=64, metavar="N", help="Number of generator processes that share each run.")
    ] = None,
    router: RouterOption = ROUTER,
    url: Annotated[
        str, typer.Option(metavar="URL", help="Send to this HTTP server instead of a router: http://HOST:PORT.")
    ] = "",
    api: Annotated[
        Literal["openai"] | None, typer.Option(help="Protocol of the server at --url; openai by default.")
    ] = None,
    tenant: TenantOption = TENANT,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory of the report.")] = Path("loadtest"),
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Run nothing; compare two reports."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(metavar="PERCENT", min=0, help="With --compare: exit with 1 if something got worse by more."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Load a cluster and write a report: DIR/report.html, report.json and requests.csv.

    [bold]loraplex loadtest --rate 20 --duration 30 --answer-tokens 128 --slo 'ttft<500ms'[/]
    """
    values = locals()
    from loraplex.loadtest.conditions import parse_condition, parse_slo
    from loraplex_client.endpoint import DEFAULT_TENANT

    with _bad_input():
        if compare is not None:
            print_comparison(*compare, threshold, as_json=as_json)
            return
        if threshold is not None:
            raise CommandError("--threshold: belongs to --compare; a test takes --fail-if")
        if api is not None and not url:
            raise CommandError("--api: belongs to --url, the address of an HTTP server")
        for flag, value in {"--duration": duration, "--rate": rate}.items():
            if value is not None and not 0 < value < math.inf:
                raise CommandError(f"{flag}: {value:g} must be a number greater than 0")
        flags = {name: values[name] for name in _KEYS}
        flags |= {"duration_s": duration, "slo": slo or None, "adapters": {"names": adapter} if adapter else None}
        for text in slo or ():
            _read("--slo", parse_slo, text)
        conditions = [_read("--fail-if", parse_condition, text) for text in fail_if or ()]
        plan = build_plan(file, flags, read_arrivals(rate, concurrency), read_sweep(sweep), tenant or DEFAULT_TENANT)
        done = _run(plan, router, url, out)
    finish(plan, url or router, done, conditions, out, as_json=as_json)


@contextlib.contextmanager
def _bad_input() -> Iterator[None]:
    """Turn mistakes in a plan, a flag or a report's file into CommandErrors with exit code 2."""
    from loraplex.loadtest.decoding import PlanError

    try:
        yield
    except PlanError as error:
        raise CommandError(str(error)) from error


def _read(flag: str, parse: Callable[[str], T], text: str) -> T:
    """Parse a flag's value. Raises CommandError that names the flag."""
    from loraplex.loadtest.decoding import PlanError

    try:
        return parse(text)
    except PlanError as error:
        raise CommandError(f"{flag}: {error}") from error


def _run(plan: LoadPlan, router: str, url: str, out: Path) -> Done:
    """Run the test against the HTTP server at `url`, or else against the router. Raises PlanError, OSError.

    Makes the report's directory first: a test whose report cannot be written is not worth its time.
    """
    from loraplex.loadtest.fleet import GeneratorDiedError
    from loraplex.loadtest.runs import prompt_pool, run_all

    target: Target
    if url:
        try:
            from loraplex.loadtest.http_sender import check_url, find_target
        except ImportError as error:
            raise CommandError("--url needs httpx2: pip install 'loraplex[loadtest]'") from error
        target, pool = find_target(plan, check_url(url))
    else:
        with explained("router", router):
            target, pool = router, prompt_pool(plan, router)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with Screen() as screen:
            return run_all(plan, target, pool, screen.show)
    except GeneratorDiedError as error:
        raise CommandError(str(error), 1) from error


def read_arrivals(rate: float | None, concurrency: int | None) -> dict[str, Any] | None:
    if rate is not None and concurrency is not None:
        raise CommandError("--rate is an open loop and --concurrency a closed one: give one of them")
    if rate is not None:
        return {"kind": "poisson", "rate_per_s": rate}
    return None if concurrency is None else {"kind": "closed", "concurrency": concurrency}


def read_sweep(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise CommandError(f"--sweep: {text!r} is not a list of numbers such as 1,2,4,8") from None


def build_plan(
    file: Path | None,
    flags: Mapping[str, Any],
    arrivals: dict[str, Any] | None,
    sweep: Sequence[float],
    tenant: str,
) -> LoadPlan:
    """Return the file's plan, overridden by the flags."""
    from loraplex.loadtest.plan import load_toml, read_plan

    values = load_toml(file) if file is not None else {}
    flag_values = {key: value for key, value in flags.items() if value is not None}
    if "requests" in flag_values or "duration_s" in flag_values:  # A flag replaces either, with its warm-up.
        for key in ("requests", "duration_s", "warm_up_requests", "warm_up_s"):
            values.pop(key, None)
    values |= flag_values
    if arrivals is not None:
        values["arrivals"] = arrivals
        values.pop("sweep", None)
    if "arrivals" not in values and not sweep:
        raise CommandError("nothing to run: give a load-test file, --rate or --concurrency")
    if sweep:
        values.setdefault("arrivals", {"kind": "closed", "concurrency": 1})
        closed = isinstance(values["arrivals"], dict) and values["arrivals"].get("kind") == "closed"
        whole = [int(value) if value.is_integer() else value for value in sweep]
        values["sweep"] = {"concurrency": whole} if closed else {"rate_per_s": list(sweep)}
    if "requests" not in values and "duration_s" not in values and file is None:
        values["duration_s"] = 10.0
    return read_plan(values, str(file or "flags"), file.parent if file else Path(), tenant=tenant)


_WAITING = "waiting for the generator processes"
# Interval of the progress lines in a pipe, in seconds.
_LINE_EVERY_S = 2.0


class Screen:
    """Shows the total progress of all generator processes on stderr; stdout is for the report."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._lined_s = time.monotonic()
        self._rate = (0.0, 0, 0.0)

    def __enter__(self) -> Self:
        if err().is_terminal:
            from rich.live import Live

            self._live = Live(console=err(), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, label: str, latest: Sequence[LoadProgress]) -> None:
        """Show the latest progress of each process; none while they start."""
        if self._live is not None:
            self._live.update(self._table(label, latest) if latest else f"{label}: {_WAITING}", refresh=True)
        elif time.monotonic() - self._lined_s >= _LINE_EVERY_S:
            self._lined_s = time.monotonic()
            sys.stderr.write((RunProgress(latest).line(label) if latest else f"{label}: {_WAITING}") + "\n")

    def _table(self, label: str, latest: Sequence[LoadProgress]) -> Table:
        from loraplex.loadtest.samples import OK

        figures = RunProgress(latest)
        last_at_s, last_tokens, rate = self._rate
        if figures.at_s < last_at_s:  # A new run has begun.
            last_at_s, last_tokens = 0.0, 0
        if figures.at_s - last_at_s > 1.0:
            rate = (figures.tokens - last_tokens) / (figures.at_s - last_at_s)
            self._rate = (figures.at_s, figures.tokens, rate)
        rows: list[tuple[object, ...]] = [
            ("sent", figures.sent),
            ("running", figures.running),
            ("answered", figures.ok),
            ("errors", figures.errors),
            ("tokens/s", f"{rate:.0f}"),
            ("TTFT ms, p50 p99", figures.ttft),
            ("ITL ms, p50 p99", figures.gaps),
        ]
        table = table_of((f"{label}, {figures.at_s:.0f} s", ""), rows)
        for status, count in sorted(figures.statuses.items()):
            if status != OK:
                table.add_row(printable(status), str(count), style="yellow")
        return table


class RunProgress:
    """The progress of all generator processes together."""

    def __init__(self, latest: Sequence[LoadProgress]) -> None:
        from loraplex.loadtest.samples import LEFT, OK

        self.at_s = max(progress.at_s for progress in latest)
        self.sent = sum(progress.sent for progress in latest)
        self.running = sum(progress.running for progress in latest)
        self.tokens = sum(progress.tokens for progress in latest)
        self.statuses = sum((Counter(progress.statuses) for progress in latest), Counter[str]())
        self.ok = self.statuses[OK]
        self.errors = self.statuses.total() - self.ok - self.statuses[LEFT]
        self.ttft = _recent([value for progress in latest for value in progress.recent_ttft_s])
        self.gaps = _recent([value for progress in latest for value in progress.recent_gap_s])

    def line(self, label: str) -> str:
        """Return a line for a pipe."""
        counts = f"{self.sent} sent, {self.running} running, {self.ok} answered, {self.errors} errors"
        return f"{label}, {self.at_s:.0f} s: {counts}; TTFT {self.ttft} ms (p50, p99)"


def _recent(values: Sequence[float]) -> str:
    import numpy as np

    if not values:
        return "-"
    middle, high = np.percentile(np.asarray(values), [50, 99]) * 1e3
    return f"{middle:.1f} {high:.1f}"


def finish(
    plan: LoadPlan, router: str, done: Done, conditions: Sequence[Condition], out: Path, *, as_json: bool
) -> None:
    """Write and print the report. Exits with 1 if a condition holds, a run had no success, or the test ended early."""
    from loraplex.loadtest.report import PAGE_NAME, whole_report, write

    command = shlex.join(["loraplex", *sys.argv[1:]])
    report = whole_report(plan, router, command, done.runs)
    write(out, report, done.samples, plan)
    if as_json:
        print_json(report)
    else:
        print_runs(done.runs)
    for run in done.runs:
        for line in (*run["warnings"], *_first_errors(run)):
            print_warning(f"{run['label']}: {line}")
    err().print(f"report: {out / PAGE_NAME}", style="dim", markup=False, soft_wrap=True)
    failed = [line for run in done.runs for line in failures(run, conditions)]
    for line in failed:
        print_error(line)
    last = done.runs[-1]
    if last["ended_early"] == "interrupted":
        raise typer.Exit(130)
    if last["ended_early"]:
        raise CommandError(f"{last['label']}: {last['ended_early']}; {last['accounting']['never_sent']} never sent", 1)
    if failed:
        raise typer.Exit(1)


def _first_errors(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the first error of each status, with the number of requests that ended so."""
    for status, message in run["messages"].items():
        yield f"{status} ({run['statuses'][status]}): {message}"


def failures(run: Mapping[str, Any], conditions: Sequence[Condition]) -> Iterator[str]:
    """Yield the reasons why a run fails the test."""
    figures = run["figures"]
    if not figures["ok"] and not figures["cancelled"]:
        yield f"{run['label']}: none of {figures['requests']} requests succeeded"
    for condition in conditions:
        if condition.holds(run):
            yield f"{run['label']}: {condition.describe(run)}, which fails {condition.text}"


def print_runs(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each run."""
    from loraplex.loadtest.report import percent

    # A test of embed or classify makes no tokens.
    unit = "texts" if any(run["figures"]["texts"] for run in runs) else "tokens"
    columns: dict[str, str | Callable[[Any], object]] = {
        "run": "label",
        "requests": lambda run: run["figures"]["requests"],
        "errors": lambda run: run["figures"]["errors"],
        "requests/s": lambda run: f"{run['figures']['requests_per_s']:.2f}",
        f"{unit}/s": lambda run: f"{run['figures'][f'{unit}_per_s']:.0f}",
        "goodput": lambda run: percent(run["figures"]["goodput_share"]),
        "cold": lambda run: run["figures"]["cold"],
    }
    for name, metric in (("TTFT", "ttft"), ("ITL", "itl"), ("latency", "latency")):
        for p in ("p50", "p99"):
            columns[f"{name} {p}"] = partial(_time_of, metric, p)
    print_table(runs, columns)


def _time_of(metric: str, percentile: str, run: Mapping[str, Any]) -> str:
    from loraplex.loadtest.report import milliseconds

    return milliseconds(run["times"][metric][percentile])


def print_comparison(first: Path, second: Path, threshold: float | None, *, as_json: bool) -> None:
    """Print what changed between two reports, and on stderr which settings differ.

    Exits with 1 if something got worse by more than `threshold` percent. Raises PlanError if a file is not a report.
    """
    from loraplex.loadtest.compare import compare, differing, too_much_worse
    from loraplex.loadtest.report import read_report

    a, b = read_report(first), read_report(second)
    rows = compare(a, b)
    columns: Columns = {
        "run": "run",
        "value": "value",
        "A": lambda row: _value(row["value"], row["a"]),
        "B": lambda row: _value(row["value"], row["b"]),
        "change": lambda row: "-" if row["change"] is None else f"{row['change'] * 100:+.1f}%",
        "": "verdict",
    }
    print_table(rows, columns, as_json=as_json)
    for name, before, after in differing(a, b):
        print_warning(f"the settings differ: {name}: A {before or 'none'}, B {after or 'none'}")
    for name, report in (("A", a), ("B", b)):
        for run in report["runs"]:
            ended = [f"ended early: {run['ended_early']}"] if run["ended_early"] else []
            for line in (*ended, *run["warnings"]):
                print_warning(f"{name}, {run['label']}: {line}")
    worse = [] if threshold is None else too_much_worse(rows, threshold / 100)
    for row in worse:
        values = " to ".join(_value(row["value"], row[side]) for side in ("a", "b"))
        print_error(f"{row['run']}: {row['value']} got worse, from {values}: by more than {threshold:g}%")
    if worse:
        raise typer.Exit(1)


def _value(name: str, value: float | None) -> str:
    """Format a time with its unit, a share as a percentage, a rate as a number."""
    from loraplex.loadtest.report import milliseconds, percent

    if name in {"requests", "errors"}:
        return f"{value or 0:.0f}"
    if "." in name:
        return f"{milliseconds(value)} ms"
    return percent(value) if name.endswith("_share") else f"{value or 0.0:.2f}"
