"""The plan of a load test, immutable and the same in every generator process, and the TOML files that it is read from.

msgspec checks every key and value of a file. docs/guides/loadtest.md lists them.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from loraplex.loadtest.arrivals import Arrivals, ClientCount, Closed, Constant, Extent, Gamma, Poisson, Ramp, Replay
from loraplex.loadtest.conditions import Slo, parse_slo
from loraplex.loadtest.decoding import (
    Decoded,
    NotNegative,
    NotNegativeInt,
    PlanError,
    Positive,
    PositiveInt,
    Share,
    convert,
    read_lines,
    read_text,
)
from loraplex.loadtest.draws import BASE_ONLY, AdapterTable, Fixed, Lengths, Listed, LogNormal, Popularity, Uniform

Task = Literal["generate", "embed", "classify"]
# Maximum number of generator processes of a run: each starts a Python with gRPC, which takes half a second of a core
# and 50 MiB, and sends thousands of requests a second.
PROCESSES = 64
# Default length of prompts and of answers, in tokens.
TOKENS = Fixed(64)


class Deadline(Decoded, frozen=True):
    """A deadline `after_s` seconds after sending, for a `share` of the requests."""

    share: Share
    after_s: Positive

    def __str__(self) -> str:
        return f"{self.after_s:g} s for {100 * self.share:g}% of the requests"


@dataclass(frozen=True)
class Cancel:
    """A cancel by the client after `after_tokens` tokens, for a `share` of the requests."""

    share: float
    after_tokens: Lengths

    def __str__(self) -> str:
        return f"of {100 * self.share:g}% of the requests, after tokens: {self.after_tokens}"


@dataclass(frozen=True)
class Tenant:
    """A tenant with its `weight` and what it asks for. With `prompts`, `prompt_tokens` does not count."""

    name: str
    weight: float = 1.0
    adapters: Popularity = BASE_ONLY
    prompts: tuple[str, ...] = ()
    prompt_tokens: Lengths = TOKENS
    answer_tokens: Lengths = TOKENS
    deadline: Deadline | None = None
    cancel: Cancel | None = None
    slos: tuple[Slo, ...] = ()


class TraceRow(Decoded, frozen=True):
    """A request of a trace. Its tenant's own settings decide what is None."""

    at_s: NotNegative
    tenant: str | None = None
    adapter: str | None = None
    prompt: str | None = None
    prompt_tokens: PositiveInt | None = None
    answer_tokens: PositiveInt | None = None


@dataclass(frozen=True)
class LoadPlan:
    """A load test: one run, or one for each value of `sweep` (a concurrency or a rate)."""

    name: str
    arrivals: Arrivals
    extent: Extent
    tenants: tuple[Tenant, ...]
    trace: tuple[TraceRow, ...] = ()
    sweep: tuple[float, ...] = ()
    seed: int = 1
    model: str = ""
    # Timeout of every request that has no deadline, so that a test ends whatever the cluster does.
    timeout_s: float = 120.0
    processes: int = 1
    # What the requests call: Generate, or Embed or Classify, each with so many texts.
    task: Task = "generate"
    texts: int = 1

    def points(self) -> list[tuple[str, LoadPlan]]:
        """Return the runs, each with its label and as a plan without a sweep."""
        if not self.sweep:
            return [(describe(self.arrivals), self)]
        runs = []
        for value in self.sweep:
            arrivals: Arrivals
            match self.arrivals:
                case Closed():
                    arrivals = Closed(int(value))
                case Poisson() | Constant() | Gamma():
                    arrivals = msgspec.structs.replace(self.arrivals, rate_per_s=value)
                case _:
                    raise TypeError(f"a sweep over {self.arrivals}")  # PlanFile refuses these.
            runs.append((describe(arrivals), dataclasses.replace(self, arrivals=arrivals, sweep=())))
        return runs


def describe(arrivals: Arrivals) -> str:
    """Return the label of a run with these arrivals, as in `Poisson, 5/s`."""
    match arrivals:
        case Closed(concurrency):
            return f"closed loop, {concurrency} at once"
        case Constant(rate_per_s):
            return f"constant, {rate_per_s:g}/s"
        case Poisson(rate_per_s) | Gamma(rate_per_s, 1.0):
            return f"Poisson, {rate_per_s:g}/s"
        case Gamma(rate_per_s, cv):
            return f"Gamma with cv {cv:g}, {rate_per_s:g}/s"
        case _:
            return type(arrivals).__name__.lower()


T = TypeVar("T")
# A list that is not empty.
Some = Annotated[tuple[T, ...], msgspec.Meta(min_length=1)]


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """Read a trace. Only `at_s` must be there; other columns and cells may be missing. Raises PlanError."""
    rows: list[TraceRow] = []
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        for cells in reader:
            row = _row(f"{path}:{reader.line_num}", cells)
            if rows and row.at_s < rows[-1].at_s:
                raise PlanError(
                    f"{path}:{reader.line_num}: at_s {row.at_s:g} comes after {rows[-1].at_s:g}: "
                    "a trace must be in the order of its times"
                )
            rows.append(row)
    except csv.Error as error:
        raise PlanError(f"{path}: {error}") from error
    if not rows:
        raise PlanError(f"{path}: the trace has no requests")
    return tuple(rows)


def _row(place: str, cells: dict[str, str | None]) -> TraceRow:
    if None in cells or None in cells.values():
        raise PlanError(f"{place}: the line needs as many cells as the header has columns")
    # A prompt's own spaces stay.
    stripped = {name: text if name == "prompt" else text.strip() for name, text in cells.items() if text}
    return convert({name: text for name, text in stripped.items() if text}, TraceRow, place, strict=False)


class TraceFile(Decoded, frozen=True, tag="trace"):
    """Arrivals of `kind = "trace"`."""

    file: str


class LengthsFile(Decoded, frozen=True, tag="file"):
    """Lengths of `kind = "file"`: one in each line, drawn with equal probability."""

    file: str


LengthsTable = PositiveInt | Fixed | Uniform | LogNormal | LengthsFile


class CancelTable(Decoded, frozen=True):
    """The table `cancel`."""

    share: Share
    after_tokens: LengthsTable = 1


class SweepTable(Decoded, frozen=True):
    """The table `sweep`; the arrivals decide which of the two it has."""

    concurrency: Some[ClientCount] | None = None
    rate_per_s: Some[Positive] | None = None


class TenantSettings(Decoded, frozen=True, kw_only=True):
    """Settings of a tenant's requests: at the top of a file for all tenants, and in a tenant's own table."""

    adapters: AdapterTable | None = None
    prompts: Some[str] | None = None
    prompt_tokens: LengthsTable | None = None
    answer_tokens: LengthsTable | None = None
    deadline: Deadline | None = None
    cancel: CancelTable | None = None
    slo: Some[str] | None = None

    def __post_init__(self) -> None:
        try:
            [parse_slo(text) for text in self.slo or ()]
        except PlanError as error:
            raise ValueError(f"slo: {error}") from error


class TenantTable(TenantSettings, frozen=True, kw_only=True):
    """A table of the list `tenants`."""

    name: str
    weight: Positive = 1.0


class PlanFile(TenantSettings, frozen=True, kw_only=True):
    """A whole file."""

    arrivals: Poisson | Gamma | Constant | Ramp | TraceFile | Closed
    name: str = "load test"
    seed: NotNegativeInt = 1
    model: str = ""
    timeout_s: Positive = 120.0
    processes: Annotated[int, msgspec.Meta(ge=1, le=PROCESSES)] = 1
    requests: PositiveInt | None = None
    duration_s: Positive | None = None
    warm_up_requests: NotNegativeInt | None = None
    warm_up_s: NotNegative | None = None
    sweep: SweepTable | None = None
    task: Task = "generate"
    texts: PositiveInt | None = None
    tenants: tuple[TenantTable, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.arrivals, Ramp | TraceFile):
            for key in ("requests", "duration_s", "warm_up_requests"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key}: a ramp or a trace ends by itself; it can have warm_up_s")
            if self.sweep is not None:
                raise ValueError("sweep: a ramp or a trace can't be swept")
        elif (self.requests is None) == (self.duration_s is None):
            raise ValueError("requests: give either requests or duration_s")
        elif self.requests is not None and self.warm_up_s is not None:
            raise ValueError("warm_up_s: a test of so many requests is warmed up with warm_up_requests")
        elif self.duration_s is not None and self.warm_up_requests is not None:
            raise ValueError("warm_up_requests: a test of so many seconds is warmed up with warm_up_s")
        if self.sweep is not None:
            closed = isinstance(self.arrivals, Closed)
            if (self.sweep.concurrency is not None) != closed or (self.sweep.rate_per_s is None) != closed:
                raise ValueError(f"sweep: these arrivals are swept with {'concurrency' if closed else 'rate_per_s'}")
        self._check_task()
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) != len(names):
            raise ValueError("tenants: two tenants have the same name")

    def _check_task(self) -> None:
        if self.task == "generate":
            if self.texts is not None:
                raise ValueError("texts: belongs to a test of embed or classify")
            return
        for table in (self, *self.tenants):
            for key in ("answer_tokens", "cancel"):
                if getattr(table, key) is not None:
                    raise ValueError(f"{key}: a call of {self.task} makes no tokens; leave it out")


def load_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises PlanError."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{path}: not TOML: {error}") from error


def read_plan(values: Mapping[str, Any], source: str, directory: Path, *, tenant: str = "default") -> LoadPlan:
    """Return the plan in the `values` of a file; file names in it are relative to `directory`.

    `tenant` names the only tenant of a file that lists none. Raises PlanError naming `source` and the key.
    """
    file = convert(values, PlanFile, source)
    trace: tuple[TraceRow, ...] = ()
    arrivals: Arrivals
    if isinstance(file.arrivals, TraceFile):
        trace = read_trace(directory / file.arrivals.file)
        arrivals = Replay(tuple(row.at_s for row in trace))
    else:
        arrivals = file.arrivals
    extent = Extent(file.requests, file.duration_s, file.warm_up_requests or 0, file.warm_up_s or 0.0)
    common = _tenant(file, Tenant(tenant), directory)
    tenants = [_tenant(table, common, directory) for table in file.tenants] or [common]
    return LoadPlan(
        file.name,
        arrivals,
        extent,
        (*tenants, *_tenants_of_trace(trace, tenants)),
        trace=trace,
        sweep=(file.sweep.rate_per_s or file.sweep.concurrency or ()) if file.sweep else (),
        seed=file.seed,
        model=file.model,
        timeout_s=file.timeout_s,
        processes=file.processes,
        task=file.task,
        texts=file.texts or 1,
    )


def _tenant(table: TenantSettings, common: Tenant, directory: Path) -> Tenant:
    """Return a tenant, with the settings of `common` where its table has none."""
    name, weight = (table.name, table.weight) if isinstance(table, TenantTable) else (common.name, common.weight)
    return Tenant(
        name,
        weight,
        common.adapters if table.adapters is None else table.adapters.popularity(directory),
        table.prompts or common.prompts,
        common.prompt_tokens if table.prompt_tokens is None else _lengths(table.prompt_tokens, directory),
        common.answer_tokens if table.answer_tokens is None else _lengths(table.answer_tokens, directory),
        table.deadline or common.deadline,
        common.cancel
        if table.cancel is None
        else Cancel(table.cancel.share, _lengths(table.cancel.after_tokens, directory)),
        common.slos if table.slo is None else tuple(parse_slo(text) for text in table.slo),
    )


def _lengths(table: LengthsTable, directory: Path) -> Lengths:
    match table:
        case int():
            return Fixed(table)
        case LengthsFile(file):
            lines = read_lines(directory / file)
            return Listed(tuple(convert(line, PositiveInt, place, strict=False) for place, line in lines))
        case _:
            return table


def _tenants_of_trace(trace: Sequence[TraceRow], tenants: Sequence[Tenant]) -> list[Tenant]:
    """Return the tenants that only a trace names: like the first tenant, with no requests but those of the trace."""
    listed = {tenant.name for tenant in tenants}
    names = dict.fromkeys(row.tenant for row in trace if row.tenant is not None and row.tenant not in listed)
    return [dataclasses.replace(tenants[0], name=name, weight=0.0) for name in names]
