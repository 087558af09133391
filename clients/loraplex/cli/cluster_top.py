"""`loraplex top`: a live view of a cluster, from one router."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli.adapters_top import AdapterNames, named_workers
from loraplex.cli.cluster import ClusterReader, Interval, Snapshot
from loraplex.cli.options import ROUTER, STORE, TENANT, JsonOption, RouterOption, StoreOption, TenantOption
from loraplex.cli.terminal import out, print_fields, print_json, print_rows, printable, show_live, table_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

# Interval in seconds between looks at the cluster.
REFRESH_S = 1.0
# Maximum number of adapters in the live view.
ADAPTERS_SHOWN = 12
# Width of a terminal, in columns, from which on the tables are whole and have bars.
_WIDE = 110

_WORKERS = ("worker", "phase", "model", "rows", "waiting", "KV cache", "adapters", "loading", "steps/s")
_QUEUES = ("model", "cell", "waiting", "running")
_LATENCIES = ("milliseconds", "p50", "p90", "p99")
_ADAPTERS = ("tenant", "adapter", "requests/s", "tokens/s", "TTFT ms", "requests")
_NARROW_WORKERS = ("worker", "phase", "model", "rows", "wait", "KV", "slots", "load", "steps/s")
_NARROW_ADAPTERS = ("tenant", "adapter", "req/s", "tok/s", "TTFT ms", "requests")
_LEVELS = "▁▂▃▄▅▆▇█"
# Number of looks that are drawn.
_HISTORY = 24
# Width of a bar, in columns.
_BAR = 12


def top(
    router: RouterOption = ROUTER,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
    once: Annotated[bool, typer.Option("--once", help="Print it once and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a live view of the cluster until Ctrl-C.

    Workers and queues are the whole cluster's. Rates, latencies and adapters are those of the asked router; --once
    shows them since that router's start. The store names the adapters on each worker.
    """
    reader, names = ClusterReader(router, tenant), AdapterNames(store, tenant)
    if as_json:
        snapshot = reader.look()
        print_json({**snapshot.to_json(), "workers": named_workers(snapshot.workers, names)})
        names.warn()
    elif not out().is_terminal:
        _print(Interval(reader.look(), None), names)
        names.warn()
    elif once:
        now = reader.look()
        out().print(view(router, Interval(now, None), names_on_devices(now, names), None, out().width))
    else:
        before, rates = deque[Snapshot](maxlen=1), Rates()

        def render() -> RenderableType:
            interval = Interval(reader.look(), before[0] if before else None)
            before.append(interval.now)
            rates.add(interval)
            on_devices = names_on_devices(interval.now, names)
            return view(router, interval, on_devices, rates, out().width, out().height)

        show_live(render, REFRESH_S)


def view(
    router: str,
    interval: Interval,
    on_devices: Mapping[str, Sequence[str]] | None = None,
    rates: Rates | None = None,
    width: int = _WIDE,
    height: int | None = None,
) -> RenderableType:
    """Render the view for a terminal of this width; of a `height` that it keeps to, by showing fewer adapters.

    `on_devices` are the names of each worker's adapters.
    """
    from rich.console import Group
    from rich.text import Text

    wide = width >= _WIDE
    parts: list[RenderableType] = [_head(router, interval, width)]
    lines = rates.lines() if rates else []
    parts += [Text("   ".join(f"{line} {name}" for name, line in lines), style="cyan"), _latencies_and_queues(interval)]
    parts += ["", _workers(interval, wide=wide)]
    parts += [
        Text(printable(f"  {worker}: {', '.join(names)}"), no_wrap=True, overflow="ellipsis")
        for worker, names in (on_devices or {}).items()
        if names
    ]
    if not interval.now.workers:
        parts.append(Text("  no worker lives", style="yellow"))
    parts.append("")
    adapters, shown = interval.adapters(), ADAPTERS_SHOWN
    if height is not None:
        # The table's head has two lines, and a last line may say that there are more.
        lines_free = height - 2 - len(out().render_lines(Group(*parts), out().options.update_width(width)))
        shown = min(shown, max(1, lines_free if len(adapters) <= lines_free else lines_free - 1))
    parts.append(
        table_of(_ADAPTERS if wide else _NARROW_ADAPTERS, [_adapter(row, interval) for row in adapters[:shown]])
    )
    if len(adapters) > shown:
        parts.append(Text(f"  and {len(adapters) - shown} more", style="dim"))
    return Group(*parts)


def names_on_devices(now: Snapshot, names: AdapterNames) -> dict[str, list[str]]:
    """Return the names of the adapters on each worker's device."""
    return {worker["worker_id"]: worker["adapter_names"] for worker in named_workers(now.workers, names)}


def _print(interval: Interval, names: AdapterNames) -> None:
    """Print the tables; in a pipe with an empty line between them."""
    print_fields(_figures(interval))
    on_devices = names_on_devices(interval.now, names)
    for headers, rows in (
        (_LATENCIES, _latency_rows(interval)),
        (_WORKERS, [_worker(worker, interval, bars=False) for worker in interval.now.workers]),
        (("worker", "adapters on the device"), [(worker, ", ".join(named)) for worker, named in on_devices.items()]),
        _queues(interval.now.queues),
        (_ADAPTERS, [_adapter(row, interval) for row in interval.adapters()]),
    ):
        out().print()
        print_rows(headers, rows)


def _figures(interval: Interval) -> list[tuple[str, str]]:
    traffic, seconds = interval.now.traffic, interval.seconds
    ended = interval.requests()
    answered = ended.pop("OK", 0)
    figures = [
        ("open", f"{traffic.open}"),
        ("requests/s", f"{answered / seconds:.1f}"),
        ("tokens/s", f"{interval.count('completion_tokens') / seconds:.0f}"),
        ("prompt tokens/s", f"{interval.count('prompt_tokens') / seconds:.0f}"),
    ]
    figures += [(f"{code}/s", f"{count / seconds:.1f}") for code, count in sorted(ended.items()) if count]
    # These events are rare, so they are counted since the router's start.
    return [*figures, ("workers lost", f"{traffic.workers_lost}"), ("redispatches", f"{traffic.redispatches}")]


def _head(router: str, interval: Interval, width: int) -> RenderableType:
    from rich.text import Text

    line = Text(f"router {router}", style="bold")
    line.append(f"  up {_age(interval.now.traffic.uptime)}", style="dim")
    if interval.since_start:
        line.append("  rates since its start", style="dim")
    figures = [
        Text.assemble((f"{value} ", "bold red" if name.isupper() else "bold"), (printable(name), "dim"))
        for name, value in _figures(interval)
    ]
    return line.append("\n").append(wrapped(figures, width))


def _latencies_and_queues(interval: Interval) -> RenderableType:
    from rich.table import Table

    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        table_of(_LATENCIES, _latency_rows(interval)),
        table_of(*_queues(interval.now.queues)),
    )
    return grid


def _latency_rows(interval: Interval) -> list[tuple[object, ...]]:
    fields = {"TTFT": "time_to_first_token", "ITL": "inter_token_latency", "in the queue": "queue_time"}
    return [
        (name, *(_ms(interval.quantile(field, fraction)) for fraction in (0.5, 0.9, 0.99)))
        for name, field in fields.items()
    ]


def _workers(interval: Interval, *, wide: bool) -> RenderableType:
    """Build the table; a narrow one without the model if all have the same, which the queues' table names."""
    heads = _WORKERS if wide else _NARROW_WORKERS
    rows = [_worker(worker, interval, bars=wide) for worker in interval.now.workers]
    model = heads.index("model")
    same = not wide and len({row[model] for row in rows}) == 1
    columns = [at for at in range(len(heads)) if at != model or not same]
    return table_of([heads[at] for at in columns], [[row[at] for at in columns] for row in rows])


def _worker(worker: Any, interval: Interval, *, bars: bool) -> tuple[object, ...]:
    blocks, slots = worker["blocks"], worker["adapter_slots"]
    steps = interval.steps_per_s(worker)
    rows, cache = (worker["rows_running"], worker["rows_limit"]), (blocks["referenced"], blocks["total"])
    return (
        worker["worker_id"],
        worker["phase"],
        worker["model"],
        (f"{bar(*rows)} " if bars else "") + f"{rows[0]}/{rows[1]}",
        worker["rows_waiting"],
        (f"{bar(*cache)} " if bars else "") + _percent(*cache),
        f"{slots['used']}/{slots['total']}",
        worker["adapter_tiers"]["loading"] + worker["adapter_tiers"]["fetching"],
        "-" if steps is None else f"{steps:.0f}",
    )


def _queues(queues: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """Return the heads and rows of the queues; with their cells where there are several."""
    several = len({queue.get("cell") for queue in queues}) > 1
    heads = [name for name in _QUEUES if several or name != "cell"]
    return heads, [[queue[name] for name in heads] for queue in queues]


def _adapter(row: dict[str, Any], interval: Interval) -> tuple[object, ...]:
    return (
        row["tenant"],
        row["adapter"] or "base model",
        f"{row['requests'] / interval.seconds:.1f}",
        f"{row['tokens'] / interval.seconds:.0f}",
        _ms(row["ttft_s"]),
        row["all_requests"],
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def bar(part: int, whole: int) -> str:
    """Draw a bar filled in proportion to `part`."""
    full = min(_BAR, -(-_BAR * part // whole)) if whole else 0
    return "█" * full + "░" * (_BAR - full)


def sparkline(values: Sequence[float]) -> str:
    """Draw values as blocks between 0 and the largest of them."""
    top = max(values, default=0.0)
    return "".join(_LEVELS[min(len(_LEVELS) - 1, int(len(_LEVELS) * value / top))] if top else "▁" for value in values)


def wrapped(figures: Sequence[Text], width: int) -> Text:
    """Join figures into lines of at most `width` columns, which break between figures alone."""
    from rich.text import Text

    lines = Text()
    used = 0
    for figure in figures:
        apart = "" if not used else "   " if used + 3 + len(figure) <= width else "\n"
        used = len(figure) + (used + 3 if apart == "   " else 0)
        lines.append(apart).append(figure)
    return lines


class Rates:
    """Requests and tokens a second of the last looks."""

    def __init__(self) -> None:
        self._requests: deque[float] = deque(maxlen=_HISTORY)
        self._tokens: deque[float] = deque(maxlen=_HISTORY)

    def add(self, interval: Interval) -> None:
        """Add the rates of an interval; one since the router's start is too long to be one of them."""
        if not interval.since_start:
            self._requests.append(interval.requests().get("OK", 0) / interval.seconds)
            self._tokens.append(interval.count("completion_tokens") / interval.seconds)

    def lines(self) -> list[tuple[str, str]]:
        """Return each rate's name and sparkline; none before the second look."""
        if not self._requests:
            return []
        return [("requests/s", sparkline(self._requests)), ("tokens/s", sparkline(self._tokens))]
