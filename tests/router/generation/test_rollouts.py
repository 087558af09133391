"""A router's part of rollouts: who gets the candidate, what is counted, what is sent again, how many shadows run."""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from loraplex.contracts.artifacts.outcomes import Outcomes, StepOutcomes, ttft_bucket
from loraplex.contracts.broker.messages import AdapterRef, Job
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.router.catalog.store_client import ResolvedAdapter, RolledOut
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.generation.rollouts import SHADOWS_AT_ONCE, Rollouts, Side, Trial, choose_side, place_of
from loraplex.router.request import Delta
from loraplex.runtime.rpc.errors import CallError, Exhausted, Internal, InvalidField, Unavailable

RELEASE = "tenants/acme/adapters/support/releases/2"
LIVE, CANDIDATE = (AdapterRef(f"tenants/acme/adapters/support/revisions/{one}", one, 8, 1) for one in ("one", "two"))


def resolved(permille: int, shadow: int = 0) -> ResolvedAdapter:
    """Return a live revision in whose place another is rolled out."""
    candidate = ResolvedAdapter(CANDIDATE, "base")
    return ResolvedAdapter(
        LIVE, "base", candidate=RolledOut(candidate, RELEASE, 1, permille, shadow, ("I cannot", "Sorry"))
    )


def side(*, candidate: bool = False, shadow: bool = False) -> Side:
    chosen = choose_side(resolved(1000 if candidate else 0, 1000 if shadow else 0), "key")
    assert chosen is not None
    return chosen


def answered(ids: tuple[int, ...] = (1, 2, 3, 4), ttft_s: float = 0.02) -> RoutedJob:
    """Return a job whose answer has these ids."""
    job = Job("j", "acme", "tiny", "base", "here", (7,), StoppingParams(64), "r", sampling=SamplingParams())
    routed = RoutedJob(replace(job, adapter=LIVE))
    routed.choices[0].emitted.extend(ids)
    routed.first_token_at = time.monotonic() + ttft_s
    return routed


def test_a_share_of_the_sessions_gets_the_candidate_and_keeps_it() -> None:
    assert choose_side(ResolvedAdapter(LIVE, "base"), "key") is None
    keys = [f"session {number}" for number in range(2_000)]
    former: set[str] = set()
    for permille in (0, 50, 250, 999):
        chosen = {key for key in keys if (one := choose_side(resolved(permille), key)) is not None and one.is_candidate}
        assert former <= chosen, "a larger share takes nobody away"
        assert abs(len(chosen) / 2_000 - permille / 1_000) < 0.02
        former = chosen
    shadowed = [choose_side(resolved(500, 1000), key) for key in keys]
    assert {(one.is_candidate, one.shadow is None) for one in shadowed if one} == {(True, True), (False, False)}


def test_nobody_can_reckon_a_sessions_side_without_the_key() -> None:
    keys = [f"session {number}" for number in range(2_000)]
    sides = [[place_of(RELEASE, key, split_key) < 500 for key in keys] for split_key in ("", "one", "two")]
    for first, second in combinations(sides, 2):
        assert 900 < sum(map(operator.eq, first, second)) < 1_100


def test_the_owners_requests_decide_over_its_release_alone() -> None:
    rollouts = Rollouts()
    assert rollouts.takes(side(), "acme")
    assert not any(rollouts.takes(side(), "globex") for _ in range(45))


def test_a_tenant_alone_decides_nothing_over_a_shared_release() -> None:
    rollouts, shared = Rollouts(), replace(side(), release="tenants/shared/adapters/support/releases/1")
    assert sum(rollouts.takes(shared, "globex") for _ in range(45)) == 1
    assert sum(rollouts.takes(shared, tenant) for _ in range(10) for tenant in ("acme", "initech")) == 20
    assert sum(rollouts.takes(shared, "globex") for _ in range(45)) == 20


@pytest.mark.parametrize(
    ("candidate", "complete", "begun", "failure", "text", "expected"),
    [
        (True, True, True, None, "Hello", Outcomes(1, 0, 0, {ttft_bucket(0.02): 1})),
        (True, True, True, None, "Well, i CANNOT do that", Outcomes(1, 0, 1, {ttft_bucket(0.02): 1})),
        (False, True, True, None, "Sorry", Outcomes(1, 0, 1, {ttft_bucket(0.02): 1})),
        (True, False, True, Internal("NaN"), "", Outcomes(1, 1)),
        (True, False, False, Internal("NaN"), "", Outcomes()),  # the live revision answers, which counts it
        (False, False, False, Internal("NaN"), "", Outcomes(1, 1)),
        (False, False, True, Unavailable("the router", reason="ROUTER_DRAINING"), "", Outcomes()),
        (False, False, True, InvalidField("stop", "bad"), "", Outcomes()),
        (False, False, True, Exhausted("q", "full", retry_after_s=1), "", Outcomes()),
        (False, False, True, None, "", Outcomes()),  # its client has left
    ],
)
def test_what_is_counted(
    candidate: bool, complete: bool, begun: bool, failure: CallError | None, text: str, expected: Outcomes
) -> None:
    rollouts, trial = Rollouts(), Trial(side(candidate=candidate), failure=failure)
    trial.read([Delta(0, (1,), text[:4]), Delta(1, (2,), text[4:]), Delta(0, (9,), "Sorry", choice=1)])
    routed = answered()
    routed.first_token_at = trial.side.chosen_at + 0.02
    rollouts.count(trial, routed, complete=complete, begun=begun)
    store = Store()
    fake: Any = store
    asyncio.run(rollouts.report(fake))
    sums = store.sums.get((RELEASE, 1), StepOutcomes())
    assert (sums.candidate if candidate else sums.live) == expected
    assert (sums.live if candidate else sums.candidate) == Outcomes()


class Store:
    """Takes sums as the store does, or not while it is `away`."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, int], StepOutcomes] = {}
        self.reporters: list[str] = []
        self.away = False

    async def report_outcomes(self, reporter: str, sums: Mapping[tuple[str, int], StepOutcomes]) -> None:
        self.reporters.append(reporter)
        if self.away:
            raise Unavailable("the store does not answer")
        self.sums |= sums


async def test_sums_are_sent_when_they_change_and_again_while_the_store_is_away() -> None:
    rollouts, store, trial = Rollouts(), Store(), Trial(side(candidate=True))
    fake: Any = store
    await rollouts.report(fake)
    rollouts.count(trial, answered(), complete=True, begun=True)
    store.away = True
    await rollouts.report(fake)
    store.away = False
    rollouts.count_error(trial.side)
    for _ in range(3):
        await rollouts.report(fake)
    assert len(store.reporters) == 2, "nothing is sent twice that the store has"
    assert len(set(store.reporters)) == 1
    counts = store.sums[RELEASE, 1].candidate
    assert (counts.requests, counts.errors) == (2, 1)
    assert rollouts.forget_tenant("globex") == 0
    assert rollouts.forget_tenant("acme") == 1


async def test_shadow_requests_are_bounded_and_compared() -> None:
    rollouts, store, going = Rollouts(), Store(), asyncio.Event()
    jobs: list[Job] = []

    async def complete(job: Job) -> RoutedJob:
        jobs.append(job)
        await going.wait()
        if len(jobs) and job is jobs[0]:
            raise Internal("NaN")
        return answered((1, 2, 9))

    for _ in range(SHADOWS_AT_ONCE + 3):
        rollouts.shadow(Trial(side(shadow=True)), answered(), complete)
    rollouts.shadow(Trial(side(candidate=True)), answered(), complete)
    await asyncio.sleep(0)
    going.set()
    await asyncio.wait(rollouts._shadows)
    fake: Any = store
    await rollouts.close(fake)
    counts = store.sums[RELEASE, 1].shadow
    assert (counts.requests, counts.failures, counts.skipped) == (SHADOWS_AT_ONCE, 1, 3)
    assert (counts.tokens, counts.equal_tokens) == (4 * SHADOWS_AT_ONCE, 2 * (SHADOWS_AT_ONCE - 1))
    assert {(job.adapter, job.priority, job.stopping.max_tokens) for job in jobs} == {(CANDIDATE, -100, 4)}
