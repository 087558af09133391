"""The checker of refusals finds each end of a call that a client cannot act on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.short_trials.test_chaos_checker import forged
from tests.trials.chaos.checker import check
from tests.trials.chaos.history import Begun, CrowdCall, Fault, Left, Line, Observation, Refusal, Request, Revision
from tests.trials.chaos.oracle import truth
from tests.trials.chaos.plan import IN_FLIGHT, MODEL, Kind
from tests.trials.chaos.report import as_json, as_lines
from tests.trials.chaos.verdict import Verdict

REQUEST = Request(0, Revision("filler"), "a prompt", 20)
IDS = truth(MODEL, REQUEST, 0).token_ids
ANSWERED = CrowdCall(0, REQUEST, (MODEL,), "router-1", 0.6, 0.8, "OK", token_ids=IDS, ends=1)
REFUSED = CrowdCall(0, REQUEST, (MODEL,), "router-1", 0.6, 0.8, "RESOURCE_EXHAUSTED", "QUEUE_FULL", 1.0)


def verdict_of(*lines: Line, kind: str = Kind.QUEUE_FULL.value, victim: str = "filler") -> Verdict:
    fault = Fault(0, kind, victim, 0.5, 0.9, [], proof="it was")
    first = [] if any(isinstance(line, Observation) for line in lines) else [forged()]
    return check([Begun(MODEL, 1, 1, {kind: 1}), *first, *lines, fault, Left(0, 0, [])])


def changed(call: CrowdCall, **changes: Any) -> CrowdCall:
    return msgspec.structs.replace(call, **changes)


def test_answers_and_refusals_are_counted() -> None:
    verdict = verdict_of(ANSWERED, REFUSED, REFUSED)
    assert verdict.holds, verdict.findings
    assert as_json(verdict)["crowd"] == {"answered": 1, "refused": 2}
    assert as_json(verdict)["refusals"] == {"RESOURCE_EXHAUSTED QUEUE_FULL": 2}
    assert "refused:        2 RESOURCE_EXHAUSTED QUEUE_FULL" in as_lines(verdict)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (changed(REFUSED, code="CANCELLED", reason=""), "ended with CANCELLED and no reason"),
        (changed(REFUSED, code="UNAVAILABLE", reason=""), "ended with UNAVAILABLE and no reason"),
        (changed(REFUSED, code="INTERNAL", reason="INTERNAL"), "ended with INTERNAL and INTERNAL"),
        (changed(REFUSED, retry_s=None), "were refused with QUEUE_FULL and no RetryInfo"),
        (changed(REFUSED, retry_s=121.0), "were refused with QUEUE_FULL and told to wait for more than 120 s"),
        (changed(REFUSED, token_ids=IDS[:3]), "had begun and were ended with QUEUE_FULL"),
        (changed(REFUSED, token_ids=IDS[1:3]), "got tokens that are not the answer's"),
        (changed(REFUSED, ends=1), "ended twice"),
        (changed(ANSWERED, ends=0), "got 0 summaries"),
        (changed(ANSWERED, ends=2), "got 2 summaries"),
        (changed(ANSWERED, token_ids=IDS[:-1]), "got a part of the answer"),
        (changed(ANSWERED, token_ids=()), "got a part of the answer"),
        (changed(ANSWERED, models=()), "got tokens that are not the answer's"),
    ],
)
def test_a_call_that_ends_badly_is_found(call: CrowdCall, found: str) -> None:
    verdict = verdict_of(call, call, ANSWERED)
    assert verdict.findings == [f"fault 0: 2 calls of its crowd {found}"]
    assert not verdict.holds


def test_a_call_of_a_router_that_died_needs_no_reason_and_may_break() -> None:
    broken = changed(REFUSED, code="UNAVAILABLE", reason="", token_ids=IDS[:3])
    whole = changed(broken, token_ids=IDS, ends=1)
    assert verdict_of(broken, whole, kind=Kind.ROUTER_KILL_FULL.value, victim="router-1").holds
    assert not verdict_of(broken, kind=Kind.ROUTER_KILL_FULL.value, victim="router-2").holds
    assert verdict_of(changed(REFUSED, token_ids=IDS[:3], may_break=True)).holds


def refused(refusal: Refusal) -> Observation:
    return forged(lambda observation: observation.refused.append(refusal))


def test_a_tenant_within_its_share_is_not_refused_while_others_are_greedy() -> None:
    refusal = Refusal(0.7, "RESOURCE_EXHAUSTED", "QUEUE_FULL", 1.0)
    kind = Kind.GREEDY_TENANTS.value
    assert len(verdict_of(refused(refusal), kind=kind).findings) == 1
    assert verdict_of(refused(refusal), kind=Kind.REDIS_FULL.value).holds
    later = msgspec.structs.replace(refusal, at=1.5)
    assert verdict_of(refused(later), kind=kind).holds
    scored = msgspec.structs.replace(refused(refusal).request, continuations=("a",) * (IN_FLIGHT + 1))
    beyond = msgspec.structs.replace(refused(refusal), request=scored)
    assert not any("within its share" in finding for finding in verdict_of(beyond, kind=kind).findings)


def test_nobody_is_refused_while_redis_is_slow() -> None:
    refusal = Refusal(0.7, "UNAVAILABLE", "NO_WORKER")
    kind = Kind.REDIS_SLOW.value
    assert verdict_of(refused(refusal), kind=kind).findings == [
        "request 0 was refused with NO_WORKER during a redis_slow"
    ]
    assert verdict_of(refused(msgspec.structs.replace(refusal, at=1.5)), kind=kind).holds


@pytest.mark.parametrize(
    ("kind", "reason"), [(Kind.STORE_KILL, "STORE_DOWN"), (Kind.ROUTER_RESTART, "ROUTER_DRAINING")]
)
def test_nobody_is_refused_because_a_store_or_a_router_is_started_again(kind: Kind, reason: str) -> None:
    refusal = Refusal(0.7, "UNAVAILABLE", reason)
    assert len(verdict_of(refused(refusal), kind=kind.value).findings) == 1
    assert verdict_of(refused(msgspec.structs.replace(refusal, reason="NO_WORKER")), kind=kind.value).holds


def test_a_call_of_the_sdk_is_answered_though_routers_are_started_again() -> None:
    ended = changed(REFUSED, code="UnavailableError", reason="ROUTER_DRAINING", router="", must_end=True)
    kind, victims = Kind.ROUTER_RESTART.value, "router-1, router-2"
    assert verdict_of(ended, kind=kind, victim=victims).findings == [
        "fault 0: 1 calls of its crowd were made through the SDK and ended with UnavailableError ROUTER_DRAINING"
    ]
    assert verdict_of(changed(ended, code="OK", token_ids=IDS, ends=1), kind=kind, victim=victims).holds


def test_a_refusal_without_a_reason_is_found_unless_a_router_was_cut_off() -> None:
    refusal = Refusal(0.7, "UNAVAILABLE", "")
    assert verdict_of(refused(refusal)).findings == ["request 0 was refused with UNAVAILABLE and no reason"]
    assert verdict_of(refused(refusal), kind=Kind.LINK_CUT.value, victim="router-1 from its clients").holds


def test_a_stream_that_a_fault_of_others_breaks_is_found() -> None:
    fault = Fault(0, Kind.BURST.value, "the routers", 0.5, 1.5, [0], proof="it was")
    lines: list[Line] = [Begun(MODEL, 1, 1, {Kind.BURST.value: 1}), forged(), fault, Left(0, 0, [])]
    assert check(lines).findings == ["request 0: fault 0 (burst) broke its call"]


def test_a_call_of_the_sdk_finds_a_full_queue_only_before_it_is_admitted() -> None:
    ended = changed(REFUSED, router="", must_end=True)
    kind = Kind.ROUTER_RESTART.value
    assert verdict_of(ended, kind=kind, victim="router-1").holds
    assert not verdict_of(changed(ended, admitted=True), kind=kind, victim="router-1").holds
