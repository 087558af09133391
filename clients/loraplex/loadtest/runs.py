"""The runs of a plan, one for each point of its sweep: their reports, and what generating the load cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np

from loraplex.loadtest.fleet import Fleet, LoadRun, Target
from loraplex.loadtest.generator import LoadProgress, Share
from loraplex.loadtest.plan import LoadPlan
from loraplex.loadtest.samples import Samples, merge
from loraplex.loadtest.statistics import loop_kind, measured, spread, summarise
from loraplex.loadtest.workload import WORDS, Workload
from loraplex_client import Client

# Timeout in seconds of the calls before the test.
_ASK_S = 10.0
# Share of a core above which requests queue in the generator: grpc.aio has one busy thread and a little more.
BUSY_SHARE = 0.85
# Lateness is reported above this many seconds and above these shares of the times that it distorts.
LATE_S = 0.005
SEND_LATE_OF_TTFT = 0.1
READ_LATE_OF_ITL = 0.25

CLOSED_NOTE = (
    "closed loop: a request is sent when the one before it has ended, so a cluster that stalls is asked less often and "
    "the slow times are undercounted (coordinated omission); measure latencies in an open loop"
)


@dataclass(frozen=True)
class Done:
    """Reports of the finished runs, each with its samples."""

    runs: tuple[dict[str, Any], ...]
    samples: tuple[tuple[str, Samples], ...]


def prompt_pool(plan: LoadPlan, router: str) -> tuple[int, ...]:
    """Ask the router for token ids to build prompts from, which also checks that it answers.

    Raises LoraplexError, also for a bad tenant name.
    """
    for tenant in plan.tenants:
        Client(router, tenant.name).close()
    with Client(router, plan.tenants[0].name, timeout_s=_ASK_S) as client:
        return tuple(dict.fromkeys(client.tokenize(WORDS, model=plan.model)))


def run_all(
    plan: LoadPlan,
    target: Target,
    pool: Sequence[int],
    on_progress: Callable[[str, Sequence[LoadProgress]], None],
) -> Done:
    """Run every point of the plan until a run ends early. `on_progress` gets the run's label.

    Raises GeneratorDiedError.
    """
    runs: list[dict[str, Any]] = []
    samples: list[tuple[str, Samples]] = []
    with Fleet(target, pool, plan.processes) as fleet:
        for label, point in plan.points():
            run = fleet.run(point, partial(on_progress, label))
            report, seen = run_report(label, point, run)
            runs.append(report)
            samples.append((label, seen))
            if report["ended_early"]:
                break
    return Done(tuple(runs), tuple(samples))


def run_report(label: str, plan: LoadPlan, run: LoadRun) -> tuple[dict[str, Any], Samples]:
    """Build the report of a run; returns it with its samples."""
    samples = merge(share.samples for share in run.shares)
    adapters = [(plan.tenants[number].name, name) for number, name in Workload(plan).adapters]
    summary = dict(summarise(plan, samples, adapters))
    cost = generator_cost(run.shares, samples)
    gave_up_s = [share.gave_up_s for share in run.shares if not math.isnan(share.gave_up_s)]
    never_sent = sum(share.never_sent for share in run.shares)
    measured_count = len(measured(plan, samples).samples)
    ended_early = ""
    if run.interrupted:
        ended_early = "interrupted"
    elif gave_up_s:
        ended_early = f"nothing answered any more; gave up after {min(gave_up_s):.1f} s"
    return {
        "label": label,
        "sweep_value": _sweep_value(plan),
        "started": datetime.fromtimestamp(run.started_unix_s, UTC).isoformat(timespec="seconds"),
        "ended_early": ended_early,
        "accounting": {
            "sent": len(samples),
            "warm_up": len(samples) - measured_count,
            "measured": measured_count,
            "never_sent": never_sent,
        },
        **summary,
        "generator": cost,
        "warnings": warnings(cost, summary["times"]),
        "notes": [CLOSED_NOTE] if loop_kind(plan) == "closed" else [],
    }, samples


def _sweep_value(plan: LoadPlan) -> float | None:
    """Return the value that a sweep varies: the concurrency or the rate."""
    arrivals = plan.arrivals
    return getattr(arrivals, "concurrency", None) or getattr(arrivals, "rate_per_s", None)


def generator_cost(shares: Sequence[Share], samples: Samples) -> dict[str, Any]:
    """Compute processor time, send delays and read delays, in seconds.

    `send_delay` is the time from a request's due time until it was sent. `read_delay` is how late the event loop woke
    up, sampled 50 times a second.
    """
    messages, requests = float(samples.column("messages").sum()), len(samples)
    cpu_s = sum(share.cpu_s for share in shares)
    delays = np.concatenate([np.asarray(share.delays_s, dtype=np.float64) for share in shares])
    return {
        "processes": len(shares),
        "cpu_s": cpu_s,
        "busy_share": max((share.cpu_s / max(share.wall_s, 1e-9) for share in shares), default=0.0),
        "cpu_us_per_message": cpu_s / (messages + requests) * 1e6 if messages + requests else None,
        "send_delay": spread(samples.column("sent_s") - samples.column("intended_s")),
        "read_delay": spread(delays),
    }


def warnings(cost: Mapping[str, Any], times: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """Return warnings for figures that the generator distorts, each with advice."""
    lines = []
    if cost["busy_share"] > BUSY_SHARE:
        lines.append(
            f"the generator is the bottleneck: a process used {cost['busy_share']:.0%} of a core; "
            "give it more with --processes, or send less"
        )
    for name, what, spoilt_s in (
        ("send_delay", "sent requests", SEND_LATE_OF_TTFT * (times["ttft"]["p50"] or 0.0)),
        ("read_delay", "read what had come", READ_LATE_OF_ITL * (times["itl"]["p99"] or 0.0)),
    ):
        late_s = cost[name]["p99"]
        if late_s is not None and late_s > max(LATE_S, spoilt_s):
            lines.append(
                f"the generator {what} up to {late_s * 1e3:.1f} ms late (p99), and the times above have that in them; "
                "give it more with --processes, or a machine of its own"
            )
    return lines
