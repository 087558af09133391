"""`loraplex loadtest`: loads a cluster as its clients do, and reports what they saw."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from clients.cli.options import ROUTER, TENANT, RouterOption, TenantOption, adapter_names
from clients.cli.service import explained
from clients.cli.terminal import CommandError

if TYPE_CHECKING:
    from clients.loadtest.fleet import Target
    from clients.loadtest.plan import LoadPlan
    from clients.loadtest.runs import Done

T = TypeVar("T")
Repeated = list[str] | None


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
            help="Adapter to request. Repeat it to draw from several uniformly.",
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
        int | None, typer.Option(metavar="N", help="Seed of all draws; the same seed gives the same requests.")
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
    """Load a cluster and write what its clients saw: DIR/report.html, report.json and requests.csv.

    [bold]loraplex loadtest --rate 20 --duration 30 --answer-tokens 128 --slo 'ttft<500ms'[/]
    """
    from loraplex_client.endpoint import DEFAULT_TENANT

    from clients.cli.loadtest_output import finish, print_comparison
    from clients.loadtest.conditions import parse_condition, parse_slo

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
        flags = {
            "requests": requests,
            "duration_s": duration,
            "adapters": {"names": adapter} if adapter else None,
            "task": task,
            "texts": texts,
            "prompt_tokens": prompt_tokens,
            "answer_tokens": answer_tokens,
            "slo": slo or None,
            "seed": seed,
            "processes": processes,
        }
        for text in slo or ():
            _read("--slo", parse_slo, text)
        conditions = [_read("--fail-if", parse_condition, text) for text in fail_if or ()]
        plan = build_plan(file, flags, read_arrivals(rate, concurrency), read_sweep(sweep), tenant or DEFAULT_TENANT)
        done = _run(plan, router, url, out)
    finish(plan, url or router, done, conditions, out, as_json=as_json)


@contextlib.contextmanager
def _bad_input() -> Iterator[None]:
    """Turn mistakes in a plan, a flag or a report's file into CommandErrors with exit code 2."""
    from clients.loadtest.decoding import PlanError

    try:
        yield
    except PlanError as error:
        raise CommandError(str(error)) from error


def _read(flag: str, parse: Callable[[str], T], text: str) -> T:
    """Parse a flag's value. Raises CommandError that names the flag."""
    from clients.loadtest.decoding import PlanError

    try:
        return parse(text)
    except PlanError as error:
        raise CommandError(f"{flag}: {error}") from error


def _run(plan: LoadPlan, router: str, url: str, out: Path) -> Done:
    """Run the test against the HTTP server at `url`, or else against the router. Raises PlanError, OSError.

    Makes the report's directory first: a test whose report cannot be written is not worth its time.
    """
    from clients.cli.loadtest_output import Screen
    from clients.loadtest.fleet import GeneratorDiedError
    from clients.loadtest.runs import prompt_pool, run_all

    target: Target
    if url:
        try:
            from clients.loadtest.http_sender import check_url, find_target
        except ImportError as error:
            raise CommandError("--url needs httpx2, which comes with loraplex[gateway]") from error
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
    from clients.loadtest.plan_file import load_toml, read_plan

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
