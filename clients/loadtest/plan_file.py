"""Load-test files: TOML, with every key known. docs/loadtest.md lists them."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clients.loadtest.arrivals import Arrivals, Closed, Constant, Extent, Gamma, Ramp, Replay, Stage
from clients.loadtest.conditions import Slo, parse_slo
from clients.loadtest.lengths import Fixed, read_lengths
from clients.loadtest.plan import Cancel, Deadline, Plan, Tenant, TraceRow
from clients.loadtest.popularity import read_popularity
from clients.loadtest.table import PlanError, Table
from clients.loadtest.trace import read_trace

_KINDS = ("poisson", "gamma", "constant", "ramp", "trace", "closed")


def load_toml(path: Path) -> dict[str, Any]:
    """The file's content. Raises PlanError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: {(error.strerror or 'not readable').lower()}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: not TOML: {error}") from error


def read_plan(values: Mapping[str, Any], source: str, directory: Path, *, tenant: str = "default") -> Plan:
    """The plan in a file's `values`; file names in it are relative to `directory`. Raises PlanError naming the key.

    `tenant` asks where the file names none.
    """
    table = Table(values, source, directory)
    name = table.text("name", "load test")
    seed = table.whole("seed", 1)
    model = table.text("model", "")
    timeout_s = table.number("timeout_s", 120.0, above=0)
    processes = table.whole("processes", 1, least=1)
    arrivals, trace = _arrivals(table.table("arrivals"))
    extent = _extent(table, arrivals)
    sweep = _sweep(table, arrivals)
    tenants = _tenants(table, tenant)
    table.finish()
    return Plan(
        name,
        arrivals,
        extent,
        _with_those_of(trace, tenants),
        trace=trace,
        sweep=sweep,
        seed=seed,
        model=model,
        timeout_s=timeout_s,
        processes=processes,
    )


def _arrivals(table: Table) -> tuple[Arrivals, tuple[TraceRow, ...]]:
    arrivals: Arrivals
    trace: tuple[TraceRow, ...] = ()
    match table.text("kind", choices=_KINDS):
        case "poisson":
            arrivals = Gamma(table.number("rate_per_s", above=0))
        case "gamma":
            arrivals = Gamma(table.number("rate_per_s", above=0), table.number("cv", above=0))
        case "constant":
            arrivals = Constant(table.number("rate_per_s", above=0))
        case "ramp":
            arrivals = Ramp(tuple(_stage(stage) for stage in table.tables("stages")))
            if not arrivals.stages:
                table.fail("stages", "give a list of {from_per_s, to_per_s, for_s}")
        case "trace":
            trace = read_trace(table.directory / table.text("file"))
            arrivals = Replay(tuple(row.at_s for row in trace))
        case _:
            arrivals = Closed(table.whole("concurrency", least=1))
    table.finish()
    return arrivals, trace


def _stage(table: Table) -> Stage:
    stage = Stage(
        table.number("from_per_s", least=0), table.number("to_per_s", least=0), table.number("for_s", above=0)
    )
    if stage.from_per_s == stage.to_per_s == 0:
        table.fail("to_per_s", "a stage needs a rate greater than 0 at one end")
    table.finish()
    return stage


def _extent(table: Table, arrivals: Arrivals) -> Extent:
    if isinstance(arrivals, Ramp | Replay):
        for key in ("requests", "duration_s", "warm_up_requests"):
            if key in table:
                table.fail(key, "a ramp or a trace ends by itself; it can have warm_up_s")
        return Extent(warm_up_s=table.number("warm_up_s", 0.0, least=0))
    if ("requests" in table) == ("duration_s" in table):
        table.fail("requests", "give either requests or duration_s")
    if "requests" in table:
        if "warm_up_s" in table:
            table.fail("warm_up_s", "a test of so many requests is warmed up with warm_up_requests")
        return Extent(table.whole("requests", least=1), warm_up_requests=table.whole("warm_up_requests", 0))
    if "warm_up_requests" in table:
        table.fail("warm_up_requests", "a test of so many seconds is warmed up with warm_up_s")
    duration_s = table.number("duration_s", above=0)
    return Extent(duration_s=duration_s, warm_up_s=table.number("warm_up_s", 0.0, least=0))


def _sweep(table: Table, arrivals: Arrivals) -> tuple[float, ...]:
    if "sweep" not in table:
        return ()
    sweep = table.table("sweep")
    if isinstance(arrivals, Closed):
        values = sweep.numbers("concurrency")
        if any(value != int(value) for value in values):
            sweep.fail("concurrency", "give whole numbers")
    elif isinstance(arrivals, Constant | Gamma):
        values = sweep.numbers("rate_per_s")
    else:
        table.fail("sweep", "a ramp or a trace can't be swept")
    sweep.finish()
    return values


def _tenants(table: Table, name: str) -> tuple[Tenant, ...]:
    """Those of the list, or one; what stands outside the list holds for all that don't say otherwise."""
    common = _tenant(table, Tenant(name))
    rows = table.tables("tenants")
    tenants = []
    for row in rows:
        base = dataclasses.replace(common, name=row.text("name"), weight=row.number("weight", 1.0, above=0))
        tenants.append(_tenant(row, base))
        row.finish()
    names = [tenant.name for tenant in tenants]
    if len(set(names)) != len(names):
        table.fail("tenants", "two tenants have the same name")
    return tuple(tenants) or (common,)


def _tenant(table: Table, base: Tenant) -> Tenant:
    return Tenant(
        base.name,
        base.weight,
        read_popularity(table, "adapters", base.adapters),
        table.texts("prompts") if "prompts" in table else base.prompts,
        read_lengths(table, "prompt_tokens", base.prompt_tokens),
        read_lengths(table, "answer_tokens", base.answer_tokens),
        _deadline(table) if "deadline" in table else base.deadline,
        _cancel(table) if "cancel" in table else base.cancel,
        _slos(table) if "slo" in table else base.slos,
    )


def _deadline(outer: Table) -> Deadline:
    table = outer.table("deadline")
    deadline = Deadline(table.share("share"), table.number("after_s", above=0))
    table.finish()
    return deadline


def _cancel(outer: Table) -> Cancel:
    table = outer.table("cancel")
    cancel = Cancel(table.share("share"), read_lengths(table, "after_tokens", Fixed(1)))
    table.finish()
    return cancel


def _slos(table: Table) -> tuple[Slo, ...]:
    slos = []
    for text in table.texts("slo"):
        try:
            slos.append(parse_slo(text))
        except PlanError as error:
            table.fail("slo", str(error))
    return tuple(slos)


def _with_those_of(trace: tuple[TraceRow, ...], tenants: tuple[Tenant, ...]) -> tuple[Tenant, ...]:
    """Tenants that only the trace names ask as the first one does; they get nothing but what the trace gives them."""
    known = {tenant.name for tenant in tenants}
    named = dict.fromkeys(row.tenant for row in trace if row.tenant is not None and row.tenant not in known)
    return (*tenants, *(dataclasses.replace(tenants[0], name=name, weight=0.0) for name in named))
