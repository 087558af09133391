"""The scaler's policy in virtual time: `python -m bench.autoscaling [--trace FILE] [--quick] [--json FILE]`.

A day of requests whose rate follows a curve, by the policy of `loraplex scaler`, by two rules of queue length, and by
the schedule that needs the fewest worker hours: one number of workers for each hour, chosen in hindsight. The requests
are those of the published multi-LoRA trace; with --trace also those of a file of Azure's published traces
(AzureLLMInferenceTrace_conv.csv), repeated through the day.
"""

from __future__ import annotations

import argparse
import csv
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.autoscaling_cluster import ROWS, WAIT_S, Outcome, Rule, TimedJob, Workers, jobs_of
from bench.command import command_parser, run_parsed
from bench.report import Aim, Report, progress
from bench.trace import Trace, draw
from loraplex.operator.scaler.policy import FALL_S, Observation, Pool, PoolRules

AIMS = {
    "slo_attainment": Aim(at_least=0.99),
    "worker_hours_over_best_fixed": Aim(at_most=1.15),
    "turns_over_queue_length_rule": Aim(),
}
PAGE = Path(__file__).parents[1] / "docs" / "results" / "scaling.md"
# Share of jobs that must wait at most WAIT_S, for the schedule in hindsight.
_ATTAINED = 0.99
# Mean load in workers, and how far the day's curve swings about it.
_MEAN, _SWING = 6.0, 0.8
_HOUR_S = 3600.0
# The policy's first guess of a worker's rate, which is some other than the right one, and its bounds.
_RULES = PoolRules(least=1, most=64, wait_s=WAIT_S, idle_s=600.0, worker_rate=2_000.0)
# Time in seconds before an hour for which its line of jobs is simulated, so that it does not begin empty.
_BEFORE_S = 300.0

# A request: its arrival in s, and the tokens of its prompt and of its answer.
Lengths = Sequence[tuple[float, int, int]]


@dataclass(frozen=True)
class Setup:
    """The hours of a day, and the requests of the drawn trace, which is repeated."""

    hours: int
    requests: int
    rate: float = 3.0


FULL, QUICK = Setup(hours=24, requests=20_000), Setup(hours=6, requests=5_000)


def main() -> None:
    """Run the benchmark with the command line's arguments; `--write-docs` writes its tables of the page."""
    parser = command_parser("autoscaling", __doc__ or "")
    parser.add_argument("--trace", type=Path, metavar="FILE", action="append", default=[], help="a trace of Azure's")
    parser.add_argument("--write-docs", action="store_true", help=f"write the figures into docs/results/{PAGE.name}")
    run_parsed(parser, _measure, PAGE)


def _measure(arguments: argparse.Namespace) -> Report:
    return measure(QUICK if arguments.quick else FULL, arguments.trace, arguments.quick)


def measure(setup: Setup, files: Sequence[Path], quick: bool) -> Report:
    """Simulate a day of each trace by each rule. The ratios are the worst of all traces."""
    drawn = draw(Trace(adapters=100, requests=setup.requests, lengths=(8, 512), rate=setup.rate), 256, 1)
    traces: dict[str, Lengths] = {
        "multi-LoRA": [(one.at_s, len(one.request.prompt_ids), one.request.tokens) for one in drawn]
    }
    traces |= {file.stem: read_azure(file) for file in files}
    rows = [row for name, lengths in traces.items() for row in _rows(name, day_of(lengths, setup.hours), setup.hours)]
    scaled = [row for row in rows if row["rule"] == "scaler"]
    queue = {row["trace"]: row["turns"] for row in rows if row["rule"] == _QUEUE_LENGTH}
    return Report(
        name="autoscaling",
        command="python -m bench.autoscaling" + "".join(f" --trace {file.name}" for file in files),
        quick=quick,
        setup={"hours": setup.hours, "mean load": _MEAN, "swing": _SWING, "wait_s": WAIT_S},
        rows=rows,
        ratios={
            "slo_attainment": min(row["attained"] for row in scaled),
            "worker_hours_over_best_fixed": max(row["of fixed"] for row in scaled),
            "turns_over_queue_length_rule": max(row["turns"] / max(1, queue[row["trace"]]) for row in scaled),
        },
        aims=AIMS,
    )


def read_azure(path: Path) -> Lengths:
    """Read a trace of columns TIMESTAMP, ContextTokens, GeneratedTokens."""
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return [
        (at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"])) for at_s, row in zip(times, rows, strict=True)
    ]


def day_of(lengths: Lengths, hours: int) -> list[TimedJob]:
    """Return a day of a trace that is repeated, with gaps that are longer at night, as many jobs an hour as there."""
    day: list[tuple[float, int, int]] = []
    at_s, end_s = 0.0, hours * _HOUR_S
    while at_s < end_s:
        for (before, _, _), (now, prompt, answer) in pairwise(lengths):
            at_s += (now - before) / (1 - _SWING * math.cos(2 * math.pi * at_s / end_s))
            if at_s >= end_s:
                break
            day.append((at_s, prompt, answer))
    return jobs_of(day, _MEAN)


_QUEUE_LENGTH = "waiting jobs / rows"


def _rows(trace: str, jobs: list[TimedJob], hours: int) -> list[dict[str, Any]]:
    progress(f"{trace}: {len(jobs)} jobs")
    plan, fixed = best_schedule(jobs, hours)
    outcomes = {
        "best fixed": fixed,
        "scaler": _run(jobs, _by_policy(), plan[0]),
        _QUEUE_LENGTH: _run(jobs, _held(lambda seen, waiting: waiting), plan[0]),
        "jobs / rows": _run(jobs, _held(lambda seen, waiting: waiting + seen.rows_running), plan[0]),
    }
    return [
        {
            "trace": trace,
            "rule": rule,
            "attained": one.attainment,
            "wait p99 s": sorted(one.waits_s)[int(len(one.waits_s) * 0.99)],
            "worker hours": one.worker_s / 3600,
            "of fixed": one.worker_s / fixed.worker_s,
            "most": max(one.sizes),
            "turns": one.turns,
        }
        for rule, one in outcomes.items()
    ]


def _run(jobs: Sequence[TimedJob], rule: Rule, first: int) -> Outcome:
    return Workers(jobs, rule, first).run()


def _by_policy() -> Rule:
    pool = Pool(_RULES)
    return lambda seen, _: pool.observe(seen)


def _held(jobs_of_rule: Rule) -> Rule:
    """Return a rule of so many jobs a row, whose highest value of FALL_S counts, as of Kubernetes' autoscaler."""
    wants: deque[tuple[float, int]] = deque()

    def rule(seen: Observation, waiting: int) -> int:
        wants.append((seen.at_s, max(1, math.ceil(jobs_of_rule(seen, waiting) / ROWS))))
        while wants[0][0] <= seen.at_s - FALL_S:
            wants.popleft()
        return min(_RULES.most, max(workers for _, workers in wants))

    return rule


def best_schedule(jobs: Sequence[TimedJob], hours: int) -> tuple[list[int], Outcome]:
    """Return the workers of each hour that attain the aim with the fewest hours, and what they reach; starts are free.

    Workers are added to the hour in which one more helps most jobs, until enough wait no longer than they should.
    """
    times = [job.at_s for job in jobs]

    @cache
    def late(hour: int, workers: int) -> int:
        begin_s = hour * _HOUR_S
        part = jobs[bisect_left(times, begin_s - _BEFORE_S) : bisect_left(times, begin_s + _HOUR_S)]
        return sum(at_s >= begin_s for at_s in Workers(part, lambda *_: workers, workers).run().late_at_s)

    def load(hour: int) -> float:
        part = jobs[bisect_left(times, hour * _HOUR_S) : bisect_left(times, (hour + 1) * _HOUR_S)]
        return sum(job.runs_s for job in part) / _HOUR_S / ROWS

    plan = [max(1, math.ceil(load(hour))) for hour in range(hours)]
    while sum(late(hour, workers) for hour, workers in enumerate(plan)) > (1 - _ATTAINED) * len(jobs):
        helped = [late(hour, workers) - late(hour, workers + 1) for hour, workers in enumerate(plan)]
        plan[helped.index(max(helped))] += 1
    while True:  # an hour's line may reach into the next one
        rule: Rule = lambda seen, _: plan[min(hours - 1, int(seen.at_s / _HOUR_S))]  # noqa: E731
        outcome = Workers(jobs, rule, plan[0], start_s=0.0).run()
        if outcome.attainment >= _ATTAINED:
            return plan, outcome
        (worst, _), *_ = Counter(min(hours - 1, int(at_s / _HOUR_S)) for at_s in outcome.late_at_s).most_common(1)
        plan[worst] += 1


if __name__ == "__main__":
    main()
