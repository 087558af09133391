"""The check of refusals: each has a status and a reason, and breaks no stream that has begun.

Where the connection to a router was broken by a fault, its calls may end without a reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.trials.chaos.history import CrowdCall, Fault, Observation, Request
from tests.trials.chaos.oracle import truth
from tests.trials.chaos.plan import FAIR_KINDS, IN_FLIGHT, Kind
from tests.trials.chaos.verdict import Verdict

# Seconds for which the end of a broken connection may still show after it was mended: keepalive takes five of them.
BROKEN_S = 10.0
# Maximum seconds that a refused call of a crowd is told to wait: no fault lasts as long.
RETRY_MAX_S = 120.0
# Statuses that no refusal has: they say that something was not refused but failed.
_FAILURES = {"CANCELLED", "UNKNOWN", "INTERNAL", "DEADLINE_EXCEEDED"}
# Reasons after which no wait helps, so that no RetryInfo belongs to them.
_FINAL = {"CLIENT_TOO_SLOW"}
# Faults in which routers do not answer.
_AWAY = {Kind.ROUTER_KILL, Kind.ROUTER_KILL_FULL, Kind.ROUTER_RESTART, Kind.ROUTER_STOP, Kind.RESTART_WIPE}
# Reasons with which nobody is refused while such a fault lasts, for at most so many seconds.
_PROMISES: dict[Kind, tuple[str, float]] = {
    Kind.REDIS_SLOW: ("NO_WORKER", math.inf),  # beside other work a call may take longer than it has: QUEUE_DOWN
    Kind.ROUTER_RESTART: ("ROUTER_DRAINING", math.inf),
    Kind.STORE_KILL: ("STORE_DOWN", 4.0),
}


class Doors:
    """The times at which the connections of clients to routers were broken."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._broken = [
            (victim.partition(" ")[0], fault.began, fault.mended + BROKEN_S)
            for fault in faults
            for victim in fault.victim.split(", ")
            if fault.kind in _AWAY or fault.victim.endswith(" from its clients")
        ]

    def broken(self, began: float, ended: float, router: str = "") -> bool:
        """Return whether a connection to this router, or to any, was broken between two times."""
        return any(since <= ended and until >= began for name, since, until in self._broken if router in {"", name})


def check_crowd(verdict: Verdict, calls: Iterable[CrowdCall], doors: Doors, *, overlap: bool) -> None:
    """Check the calls of all crowds; one finding for all of a fault that have the same one.

    With `overlap` another fault may have ended a call that one fault does not end.
    """
    found = Counter[tuple[int, str]]()
    for call in calls:
        verdict.crowd["answered" if call.code == "OK" else "refused"] += 1
        if call.code != "OK":
            verdict.refusals[f"{call.code} {call.reason or 'without a reason'}"] += 1
        problem = _problem(call, broken=doors.broken(call.began, call.ended, call.router))
        # A call that was not admitted yet may find the queue full of calls that the other router has handed back.
        is_refused = call.code != "OK" and (call.admitted or call.reason != "QUEUE_FULL")
        if call.must_end and is_refused and not problem and not overlap:
            problem = f"were made through the SDK and ended with {call.code} {call.reason}"
        if problem:
            found[call.fault, problem] += 1
    verdict.findings += [f"fault {fault}: {count} calls of its crowd {what}" for (fault, what), count in found.items()]


def _problem(call: CrowdCall, *, broken: bool) -> str:
    """Return what is wrong with a call; empty: nothing."""
    tokens = call.token_ids
    answers = [truth(model, call.request, 0).token_ids for model in call.models] if tokens else []
    if tokens and not any(answer[: len(tokens)] == tokens for answer in answers):
        return "got tokens that are not the answer's"
    if call.code != "OK":  # a router may also die between an answer and its status
        return "" if broken else _problem_of_refusal(call)
    if call.ends != 1:
        return f"got {call.ends} summaries"
    return "" if tokens in answers else "got a part of the answer"


def _problem_of_refusal(call: CrowdCall) -> str:
    if call.ends:
        return "ended twice"
    if not call.reason or call.code in _FAILURES:
        return f"ended with {call.code} and {call.reason or 'no reason'}"
    if call.code == "RESOURCE_EXHAUSTED" and call.retry_s is None and call.reason not in _FINAL:
        return f"were refused with {call.reason} and no RetryInfo"
    if (call.retry_s or 0) > RETRY_MAX_S:
        return f"were refused with {call.reason} and told to wait for more than {RETRY_MAX_S:.0f} s"
    return f"had begun and were ended with {call.reason}" if call.token_ids and not call.may_break else ""


def _open_jobs(observations: Iterable[Observation], request: Request, at: float) -> int:
    """Return the jobs that the tenant of a request had open at a time: one for each text of a Score or an Embed.

    Requests begin in the order of their numbers; what an observation has of a call comes later.
    """
    return sum(
        max(
            1,
            len(one.request.continuations),
            len(one.request.documents),
            len(one.request.texts.inputs) if one.request.texts else 0,
        )
        for one in observations
        if one.request.revision.tenant == request.revision.tenant
        and (one.request.number <= request.number or min([call.at for call in one.calls], default=math.inf) <= at)
        and one.ended >= at
    )


def check_refusals(
    verdict: Verdict, observations: Sequence[Observation], faults: Sequence[Fault], doors: Doors
) -> None:
    """Check the refusals of requests that were sent again; `faults` are those that came one at a time."""
    fair = [fault for fault in faults if fault.kind in FAIR_KINDS]
    promised = [(fault, *_PROMISES[Kind(fault.kind)]) for fault in faults if fault.kind in _PROMISES]
    for observation in observations:
        number = observation.request.number
        for refusal in observation.refused:
            verdict.refusals[f"{refusal.code} {refusal.reason or 'without a reason'}"] += 1
            if not refusal.reason and not doors.broken(refusal.at - BROKEN_S, refusal.at):
                verdict.findings.append(f"request {number} was refused with {refusal.code} and no reason")
            for fault, reason, most_s in promised:
                lasts = fault.began <= refusal.at <= fault.mended and fault.mended - fault.began <= most_s
                if lasts and refusal.reason == reason:
                    verdict.findings.append(f"request {number} was refused with {reason} during a {fault.kind}")
            crowded = [fault for fault in fair if fault.began <= refusal.at <= fault.mended]
            is_full = refusal.code == "RESOURCE_EXHAUSTED" and refusal.reason != "QUOTA_EXCEEDED"
            if is_full and crowded and _open_jobs(observations, observation.request, refusal.at) <= IN_FLIGHT:
                verdict.findings.append(
                    f"request {number}, of a tenant within its share, was refused with {refusal.reason} at fault "
                    f"{crowded[0].number} ({crowded[0].kind})"
                )
