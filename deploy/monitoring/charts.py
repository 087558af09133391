"""Charts of the dashboards by kind, and the PromQL behind them."""

from __future__ import annotations

from dataclasses import dataclass

# Grafana's names of units.
SECONDS, SHARE, BYTES, COUNT = "s", "percentunit", "bytes", "short"
PER_SECOND = "ops"


@dataclass(frozen=True)
class Panel:
    """A chart. `queries` are PromQL expressions and the legends of their series."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    meaning: str = ""


@dataclass(frozen=True)
class Dashboard:
    """A dashboard. `variable` is the label that its reader picks a value of, from the series of `metric`."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    variable: str = ""
    metric: str = ""


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Return the query of a counter's increase a second, summed up by a label."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{where}[$__rate_interval]))"


def rates(title: str, metric: str, by: str, where: str = "", meaning: str = "") -> Panel:
    """Chart the events a second of each value of a label."""
    query = rate(metric, by, where)
    if by == "adapter":  # the base model's have none, and would have no legend
        query = f'label_replace({query}, "adapter", "base model", "adapter", "")'
    return Panel(title, PER_SECOND, ((query, f"{{{{{by}}}}}"),), meaning)


def quantile(share: float, metric: str) -> str:
    """Return the query of a quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', 'le')})"


def quantiles(title: str, metric: str, meaning: str = "") -> Panel:
    """Chart three quantiles of a histogram of seconds."""
    return Panel(
        title, SECONDS, tuple((quantile(share, metric), f"p{share * 100:g}") for share in (0.5, 0.9, 0.99)), meaning
    )


def hit_rate(tier: str) -> str:
    """Return the query of the share of requests whose adapter was in a tier."""
    hits = rate("loraplex_adapter_requests_total", where=f'{{tier="{tier}",result="hit"}}')
    return f"{hits} / " + rate("loraplex_adapter_requests_total", where=f'{{tier="{tier}"}}')
