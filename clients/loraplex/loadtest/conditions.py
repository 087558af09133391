"""Service-level objectives of requests (`ttft<500ms`) and conditions on reports (`ttft.p99>500ms`)."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.loadtest.decoding import PlanError

TIMES = ("ttft", "itl", "tpot", "latency")
STATISTICS = ("mean", "min", "max", "p50", "p90", "p95", "p99", "p99.9")
# Figures of a whole run: numbers without a unit; shares are from 0 to 1.
FIGURES = (
    "errors",
    "error_share",
    "requests_per_s",
    "tokens_per_s",
    "texts",
    "texts_per_s",
    "goodput_per_s",
    "goodput_share",
    "cold_share",
)

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_SLO = re.compile(r"\s*(\w+)\s*<=?\s*([0-9.]+)\s*(us|ms|s)\s*")
_CONDITION = re.compile(r"\s*([a-z_]+)(?:\.([a-z0-9.]+))?\s*(>=|<=|>|<)\s*([0-9.]+)\s*(us|ms|s|%)?\s*")


@dataclass(frozen=True)
class Slo:
    """An objective: a request meets it if its `metric`, or each of its gaps for `itl`, is at most `limit_s`."""

    metric: str
    limit_s: float
    text: str


@dataclass(frozen=True)
class Condition:
    """A comparison of a report's value with `limit`, in seconds or in the figure's own unit."""

    metric: str
    statistic: str
    compare: str
    limit: float
    text: str

    def value(self, run: Mapping[str, Any]) -> float | None:
        """Return the value in a run of a report; None if nothing was measured."""
        figure = run["times"][self.metric][self.statistic] if self.statistic else run["figures"][self.metric]
        return None if figure is None else float(figure)

    def holds(self, run: Mapping[str, Any]) -> bool:
        """Return whether the condition holds. A time that was never measured counts as above every limit."""
        value = self.value(run)
        if value is None:
            return self.compare in {">", ">="}
        return _OPERATORS[self.compare](value, self.limit)

    def describe(self, run: Mapping[str, Any]) -> str:
        """Format the value for a message."""
        value = self.value(run)
        name = f"{self.metric}.{self.statistic}" if self.statistic else self.metric
        if value is None:
            return f"{name} was never measured"
        return f"{name} is {value * 1e3:.1f} ms" if self.statistic else f"{name} is {value:.4g}"


def parse_slo(text: str) -> Slo:
    """Read `METRIC<TIME`, such as `ttft<500ms`. Raises PlanError."""
    match = _SLO.fullmatch(text)
    limit = None if match is None else _number(match[2])
    if match is None or match[1] not in TIMES or limit is None:
        raise PlanError(f"{text!r} is not an SLO such as ttft<500ms, of {', '.join(TIMES)}, in us, ms or s")
    return Slo(match[1], limit * _UNITS_S[match[3]], text.strip())


def parse_condition(text: str) -> Condition:
    """Read `METRIC.STATISTIC>TIME` or `FIGURE>NUMBER`. Raises PlanError."""
    match = _CONDITION.fullmatch(text)
    number = None if match is None else _number(match[4])
    if match is None or number is None:
        raise PlanError(f"{text!r} is not a condition such as ttft.p99>500ms or error_share>0.01")
    metric, statistic, compare, _, unit = match.groups()
    if statistic:
        if metric not in TIMES or statistic not in STATISTICS:
            raise PlanError(
                f"{text!r}: {metric}.{statistic} is not one of {', '.join(TIMES)} with one of {', '.join(STATISTICS)}"
            )
        if unit not in _UNITS_S:
            raise PlanError(f"{text!r}: a time needs its unit: us, ms or s")
        return Condition(metric, statistic, compare, number * _UNITS_S[unit], text.strip())
    if metric not in FIGURES:
        raise PlanError(
            f"{text!r}: {metric} is not one of {', '.join(FIGURES)}, nor a time with its statistic, such as ttft.p99"
        )
    if unit not in {None, "%"}:
        raise PlanError(f"{text!r}: {metric} has no unit {unit}")
    return Condition(metric, "", compare, number / 100 if unit else number, text.strip())


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
