"""Rollouts of adapters' revisions: which requests get the candidate, and how requests of both sides ended.

A request's place among 1,000 is a keyed hash of the release and its session, or else its id: a conversation, a repeated
call and a larger share keep the side. Sums go to the store, which takes the next step or rolls back.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace

from loraplex.contracts.artifacts.names import SHARED
from loraplex.contracts.artifacts.outcomes import Outcomes, StepOutcomes, ttft_bucket
from loraplex.contracts.broker.commands import is_of_tenant
from loraplex.contracts.broker.messages import AdapterRef, Job
from loraplex.contracts.broker.terms import PRIORITY_LIMIT
from loraplex.router.catalog.store_client import ResolvedAdapter, StoreClient
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.request import Delta, Event
from loraplex.runtime.rpc.errors import (
    Aborted,
    CallError,
    DataLoss,
    DeadlinePassed,
    Exhausted,
    Internal,
    Mismatch,
    NotFound,
    Unavailable,
)
from loraplex.runtime.telemetry.logging import LogOnce

log = logging.getLogger(__name__)

# Interval in seconds between reports to the store.
REPORT_S = 1.0
# Maximum number of steps whose sums are kept; the oldest ones go first, which the store has.
_STEPS_KEPT = 1_000
# Number of characters at the beginning of an answer in which a refusal is looked for.
_OPENING_CHARACTERS = 200
# Maximum number of shadow requests at once, so that they take a small part of a cluster; timeout in seconds of one.
SHADOWS_AT_ONCE = 8
SHADOW_S = 60.0
# Errors that count against a revision; others are the caller's, or of a limit.
_FAULTS = (Internal, DataLoss, Unavailable, Mismatch, NotFound)
# Errors that a live revision would have given too, or that another try makes worse.
NOT_OF_REVISIONS = (Aborted, DeadlinePassed, Exhausted)
# Reasons of errors that are the router's own, as well.
OF_ROUTER = frozenset({"ROUTER_DRAINING", "CONTENT_HOOK_AWAY"})


@dataclass(frozen=True, slots=True)
class Side:
    """A request's side of a rollout: the revision that it gets, `resolved`, beside the `live` one.

    `shadow`: the candidate that computes it once more. Requests that the candidate could not answer are not counted for
    the live revision, which then does.
    """

    release: str
    step: int
    live: ResolvedAdapter
    resolved: ResolvedAdapter
    is_candidate: bool = False
    is_counted: bool = True
    shadow: AdapterRef | None = None
    refusal_phrases: tuple[str, ...] = ()
    # Time of the monotonic clock from which the first token is waited for: a template may be slow as well.
    chosen_at: float = field(default_factory=time.monotonic)


def place_of(release: str, key: str, split_key: str = "", purpose: str = "canary") -> int:
    """Return the place from 0 to 999 of a session or request in a rollout."""
    return int.from_bytes(hmac.digest(split_key.encode(), f"{purpose} {release}\0{key}".encode(), "sha256")[:8]) % 1000


def choose_side(resolved: ResolvedAdapter, key: str) -> Side | None:
    """Return the side of a request for a name; None where nothing is rolled out in its place."""
    candidate = resolved.candidate
    if candidate is None:
        return None
    side = Side(candidate.release, candidate.step, resolved, resolved, refusal_phrases=candidate.refusal_phrases)
    if place_of(candidate.release, key, candidate.split_key) < candidate.permille:
        return replace(side, resolved=candidate.resolved, is_candidate=True)
    shadowed = place_of(candidate.release, key, candidate.split_key, "shadow") < candidate.shadow_permille
    return replace(side, shadow=candidate.resolved.ref) if shadowed else side


@dataclass(slots=True)
class Trial:
    """A request under a rollout, and the beginning of its first answer."""

    side: Side
    opening: str = ""
    failure: CallError | None = None

    def read(self, events: Iterable[Event]) -> None:
        """Take events of the answer."""
        for event in events:
            if isinstance(event, Delta) and event.choice == 0 and len(self.opening) < _OPENING_CHARACTERS:
                self.opening = (self.opening + event.text)[:_OPENING_CHARACTERS]

    @property
    def is_refusal(self) -> bool:
        """Tell whether the answer begins as a refusal."""
        opening = self.opening.lower()
        return any(phrase.lower() in opening for phrase in self.side.refusal_phrases)


@dataclass(slots=True)
class _Step:
    outcomes: StepOutcomes = field(default_factory=StepOutcomes)
    is_reported: bool = True
    # Of a shared adapter's release: the requests of each tenant that count.
    of_tenants: Counter[str] = field(default_factory=Counter)


class Rollouts:
    """The sums of one router, and its shadow requests."""

    def __init__(self) -> None:
        # A router that starts again counts from 0: its sums are kept beside those of its former run.
        self._reporter = secrets.token_hex(16)
        self._steps: dict[tuple[str, int], _Step] = {}
        self._shadows: set[asyncio.Task[None]] = set()
        self._once = LogOnce(log)

    def takes(self, side: Side, tenant: str) -> bool:
        """Tell whether a tenant's request counts, so that others decide nothing over a tenant's release.

        Requests of the adapter's owner count; of a shared adapter those of all tenants, but of each one at most as many
        as of all others together, and one more.
        """
        if not is_of_tenant(side.release, SHARED):
            return is_of_tenant(side.release, tenant)
        of_tenants = self._step(side).of_tenants
        if 2 * of_tenants[tenant] > of_tenants.total():
            return False
        of_tenants[tenant] += 1
        return True

    def count(self, trial: Trial, routed: RoutedJob, *, complete: bool, begun: bool) -> None:
        """Count the end of a request; one whose client has left is not counted.

        A candidate that fails before its answer has begun is counted by `count_error`.
        """
        if complete:
            outcomes = Outcomes(requests=1, refusals=int(trial.is_refusal))
            if routed.first_token_at is not None:
                outcomes.ttft_buckets[ttft_bucket(routed.first_token_at - trial.side.chosen_at)] = 1
        elif (
            isinstance(trial.failure, _FAULTS)
            and trial.failure.reason not in OF_ROUTER
            and (begun or not trial.side.is_candidate)
        ):
            outcomes = Outcomes(requests=1, errors=1)
        else:
            return
        sums = self._outcomes(trial.side)
        (sums.candidate if trial.side.is_candidate else sums.live).add(outcomes)

    def count_error(self, side: Side) -> None:
        """Count a request that the live revision answered, after the candidate had failed."""
        self._outcomes(side).candidate.add(Outcomes(requests=1, errors=1))

    def shadow(self, trial: Trial, live: RoutedJob, complete: Callable[[Job], Awaitable[RoutedJob]]) -> None:
        """Compute an answered request once more with the candidate, unless too many such run; never waits."""
        candidate = trial.side.shadow
        if candidate is None or live.first_token_at is None or not live.choices[0].emitted:
            return
        if len(self._shadows) >= SHADOWS_AT_ONCE:
            self._outcomes(trial.side).shadow.skipped += 1
            return
        task = asyncio.create_task(self._shadow(trial.side, candidate, live, complete))
        self._shadows.add(task)
        task.add_done_callback(self._shadows.discard)

    async def _shadow(
        self, side: Side, candidate: AdapterRef, live: RoutedJob, complete: Callable[[Job], Awaitable[RoutedJob]]
    ) -> None:
        job, tokens = live.job, len(live.choices[0].emitted)
        live_s = time.monotonic() - live.admitted_at
        job = replace(
            job,
            job_id=f"{job.job_id}.shadow",
            request_id=f"{job.request_id}.shadow",
            adapter=replace(candidate, grant=b""),
            stopping=replace(job.stopping, max_tokens=tokens),
            priority=-PRIORITY_LIMIT,
            attempt=1,
            emitted={},
            done=(),
            strikes=0,
            deadline_ms=round(SHADOW_S * 1e3),
        )
        began, ended = time.monotonic(), None
        try:
            async with asyncio.timeout(SHADOW_S):
                ended = await complete(job)
        except (CallError, TimeoutError) as error:
            if isinstance(error, CallError) and (isinstance(error, NOT_OF_REVISIONS) or error.reason in OF_ROUTER):
                return
        shadow = self._outcomes(side).shadow
        shadow.requests += 1
        shadow.tokens += tokens
        if ended is None:
            shadow.failures += 1
            return
        ours, theirs = ended.choices[0], live.choices[0]
        shadow.equal_tokens += sum(a == b for a, b in zip(ours.emitted, theirs.emitted, strict=False))
        shadow.logprob_difference += _mean_logprob(ended) - _mean_logprob(live)
        shadow.candidate_seconds += time.monotonic() - began
        shadow.live_seconds += live_s

    async def report(self, store: StoreClient) -> None:
        """Send the sums that have changed; where the store does not answer, leave them for the next time."""
        changed = {key: step for key, step in self._steps.items() if not step.is_reported}
        if not changed:
            return
        for step in changed.values():
            step.is_reported = True
        try:
            await store.report_outcomes(self._reporter, {key: step.outcomes for key, step in changed.items()})
            self._once.reset()
        except CallError as error:
            for step in changed.values():
                step.is_reported = False
            self._once(f"outcomes of rollouts are not reported: {error.message}")

    def forget_tenant(self, tenant: str) -> int:
        """Forget the sums of a tenant's releases; returns how many there were."""
        gone = [key for key in self._steps if is_of_tenant(key[0], tenant)]
        for key in gone:
            del self._steps[key]
        for step in self._steps.values():
            del step.of_tenants[tenant]
        return len(gone)

    async def close(self, store: StoreClient) -> None:
        """End the shadow requests, and send the last sums."""
        for task in tuple(self._shadows):
            task.cancel()
        await asyncio.gather(*self._shadows, return_exceptions=True)
        await self.report(store)

    def _outcomes(self, side: Side) -> StepOutcomes:
        """Return the sums of a step, which are about to change."""
        step = self._step(side)
        step.is_reported = False
        return step.outcomes

    def _step(self, side: Side) -> _Step:
        key = (side.release, side.step)
        step = self._steps.get(key)
        if step is None:
            if len(self._steps) >= _STEPS_KEPT:
                del self._steps[next(iter(self._steps))]
            step = self._steps[key] = _Step()
        return step


def _mean_logprob(routed: RoutedJob) -> float:
    values = [token.logprob for token in routed.choices[0].logprobs]
    return sum(values) / len(values) if values else 0.0
