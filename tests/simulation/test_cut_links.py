"""A worker that reaches Redis and not the router's relay, and one that reaches the relay and not Redis."""

from __future__ import annotations

import asyncio
from contextvars import Context
from dataclasses import replace

import pytest

from loraplex.router.request import Request, Stopping
from tests.hash_answers import expected_answers
from tests.simulation.faults import Fault, Kind
from tests.simulation.network import _Pipe
from tests.simulation.options import asked_of
from tests.simulation.run import Outcome, simulate_scenario
from tests.simulation.scenario import MODEL, draw
from tests.simulation.stories import End, Plan

REQUESTS = 40
# Seconds that each message between worker and router takes: more than a router waits for the report of a first claim.
LATE_S = 2.5


def plan(number: int, start_s: float, max_tokens: int) -> Plan:
    request = Request("one", (number,), "token_ids", request_id=f"r{number}", fingerprint=f"f{number}", seed=number)
    request = replace(request, stopping=Stopping(max_tokens=max_tokens, ignore_eos=True))
    return Plan(request, expected_answers(MODEL, asked_of(request, "")), start_s, router=0)


def run(workers: int, *faults: Fault, requests: int = REQUESTS, max_tokens: int = 10) -> Outcome:
    """Run requests, ten a second from 1 s on, at one router with room for all of them."""
    plans = tuple(plan(number, 1.0 + number / 10, max_tokens) for number in range(requests))
    cluster = {"workers": workers, "routers": 1, "rows": 8, "kv_blocks": 200, "backlog": False}
    outcome = simulate_scenario(replace(draw(0), plans=plans, faults=faults, **cluster))  # type: ignore[arg-type]
    assert not outcome.wrong, str(outcome)
    assert outcome.ends == {End.COMPLETED: requests}
    return outcome


def test_a_worker_that_does_not_reach_the_router_takes_none_of_its_jobs() -> None:
    whole, cut = run(2), run(2, Fault(Kind.LINK_CUT, 0.5, 10.0, worker=0, router=0))
    assert cut.attempts == whole.attempts == REQUESTS
    assert max(cut.ttft_s) < max(whole.ttft_s) + 0.1


def test_a_router_that_no_worker_reaches_refuses_within_seconds() -> None:
    cut = run(1, Fault(Kind.LINK_CUT, 0.5, 20.0, worker=0, router=0))
    assert cut.reasons == {"RELAY_UNREACHABLE"}
    assert cut.attempts <= 3 * REQUESTS


def test_reports_of_claims_that_come_late_are_waited_for_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(pipe: _Pipe, data: bytes | None) -> None:
        loop = asyncio.get_running_loop()
        pipe._last_at = max(pipe._last_at + 1e-6, loop.time() + LATE_S)
        loop.call_at(pipe._last_at, pipe._arrive, data, context=Context())

    monkeypatch.setattr(_Pipe, "send", send)
    late = run(2, requests=8)
    assert late.attempts <= 4 * 8


def test_a_worker_that_is_cut_off_from_redis_alone_keeps_its_answers() -> None:
    cut = run(1, Fault(Kind.REDIS_CUT, 2.0, 8.0, worker=0, router=0), requests=8, max_tokens=200)
    assert cut.attempts == 8
    assert not cut.reasons
