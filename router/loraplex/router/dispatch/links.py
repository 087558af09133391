"""The workers' links of one router: frames come, messages go; which are open, which incarnations count as lost."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import msgspec

from loraplex.contracts.broker.connection import CALL_S
from loraplex.contracts.broker.messages import WorkerState
from loraplex.contracts.broker.terms import SEALED_JOB_S
from loraplex.contracts.options import NO_DRAFTS, DraftCounts, FinishReason, TokenLogprobs
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.router.metrics import RouterMetrics
from loraplex.runtime.rpc.errors import CallError, Unavailable
from loraplex.runtime.rpc.principal import Principal
from loraplex.runtime.rpc.status import to_error

log = logging.getLogger(__name__)


class Frame(msgspec.Struct, frozen=True):  # one is made for each token: a dataclass takes seven times as long
    """Tokens of one choice, as a worker sends them and as the client's call reads them.

    `failure` ends the job; `returned` gives it back. `blamed` counts a strike: the worker's engine died,
    perhaps of this job.
    """

    job_id: str
    attempt: int
    offset: int
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    failure: CallError | None = None
    returned: bool = False
    blamed: bool = False
    adapter_ms: float | None = None
    cached_tokens: int | None = None
    # Left encoded: reading those of a long prompt takes long, and is done in a thread, while other frames go on.
    prompt_logprobs: Sequence[pb.TokenLogprobs] = ()
    # The vector of a job that asks for one, with its end.
    vector: tuple[float, ...] = ()
    # Of the choice in this attempt so far.
    drafts: DraftCounts = NO_DRAFTS


class WorkerLink:
    """The router's end of the relay stream from one worker incarnation: the messages that go to it."""

    def __init__(self, worker_id: str, incarnation: str, worker: Principal | None = None, peer: str = "") -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        # The holder of the worker's certificate, None without credentials, and its address.
        self.worker, self.peer = worker, peer
        # Time of the monotonic clock at which the last message came.
        self.heard_at = time.monotonic()
        # Acks, cancels and rewinds to send, by their field of the message. Any order will do: each is of one attempt or
        # choice.
        self._pending: dict[str, Any] = {}
        self._forgets: list[pb.Forget] = []
        self._closed = False
        self._due = asyncio.Event()

    def ack(self, job_id: str, attempt: int) -> None:
        """Let the worker forget the job."""
        self._pending.setdefault("acks", pb.Acks()).jobs.add(job_id=job_id, attempt=attempt)
        self._due.set()

    def cancel(self, job_id: str, attempt: int, choice: int | None = None) -> None:
        """Make the worker stop the job, or one of its choices, and free what it holds."""
        self._pending.setdefault("cancels", pb.Cancels()).jobs.add(job_id=job_id, attempt=attempt, choice=choice)
        self._due.set()

    def rewind(self, job_id: str, attempt: int, choice: int, offset: int) -> None:
        """Make the worker send a choice again from this offset."""
        positions = self._pending.setdefault("rewinds", pb.Rewinds()).positions
        positions.add(job_id=job_id, attempt=attempt, choice=choice, offset=offset)
        self._due.set()

    def pace(self, interval_ms: int) -> None:
        """Give the worker another interval between its messages."""
        self._pending["pace"] = pb.Pace(interval_ms=interval_ms)
        self._due.set()

    def forget(self, request: pb.Forget) -> None:
        """Ask the worker to remove what it has of a tenant."""
        self._forgets.append(request)
        self._due.set()

    def follow_blocks(self, on: bool) -> None:
        """Ask the worker for its prefix cache and every change of it, or for no more."""
        self._pending["follow_blocks"] = pb.FollowBlocks(on=on)
        self._due.set()

    def close(self) -> None:
        """End the stream."""
        self._closed = True
        self._due.set()

    async def messages(self) -> AsyncIterator[pb.ConnectResponse]:
        """Yield the messages to be sent until the link is closed; each has all of its kind that has come meanwhile."""
        while True:
            await self._due.wait()
            self._due.clear()
            pending, self._pending = self._pending, {}
            for name, message in pending.items():
                yield pb.ConnectResponse(**{name: message})
            while self._forgets:
                yield pb.ConnectResponse(forget=self._forgets.pop(0))
            if self._closed and not self._due.is_set():
                return


_FINISHES = {
    pb.FINISH_KIND_LENGTH: FinishReason.LENGTH,
    pb.FINISH_KIND_END: FinishReason.END,
    pb.FINISH_KIND_STOP_TOKEN: FinishReason.STOP,
    pb.FINISH_KIND_COMPLETE: FinishReason.COMPLETE,
}
_NO_FINISH = pb.Finish()


def read_frame(frame: pb.Frame) -> Frame:
    """Return the frame in a message."""
    drafts = _read_drafts(frame.drafts) if frame.HasField("drafts") else NO_DRAFTS
    # Nearly all frames have neither a beginning nor an end, and every look into a message makes an object.
    if not (frame.HasField("finish") or frame.HasField("first")):
        ids, logprobs = tuple(frame.token_ids), tuple(map(read_logprobs, frame.logprobs))
        return Frame(frame.job_id, frame.attempt, frame.offset, ids, frame.choice, logprobs, drafts=drafts)
    finish = frame.finish if frame.HasField("finish") else _NO_FINISH
    first = frame.first if frame.HasField("first") else None
    return Frame(
        job_id=frame.job_id,
        attempt=frame.attempt,
        offset=frame.offset,
        token_ids=tuple(frame.token_ids),
        choice=frame.choice,
        logprobs=tuple(map(read_logprobs, frame.logprobs)),
        finish=_FINISHES.get(finish.kind),
        failure=_failure(finish.failure) if finish.kind == pb.FINISH_KIND_FAILED else None,
        returned=finish.kind == pb.FINISH_KIND_RETURNED,
        blamed=finish.struck,
        adapter_ms=first.adapter_ms if first else None,
        cached_tokens=first.cached_tokens if first else None,
        prompt_logprobs=first.prompt_logprobs if first else (),
        vector=tuple(frame.vector),
        drafts=drafts,
    )


def _read_drafts(drafts: pb.Drafts) -> DraftCounts:
    return DraftCounts(drafts.steps, drafts.tokens, drafts.accepted)


def read_logprobs(token: pb.TokenLogprobs) -> TokenLogprobs:
    """Return the log probabilities in a message."""
    return TokenLogprobs(token.logprob, tuple(zip(token.token_ids, token.logprobs, strict=True)))


def _failure(failure: pb.Failure) -> CallError:
    return to_error(failure.code, failure.reason, failure.message, failure.field)


@dataclass(frozen=True, slots=True)
class DispatchTiming:
    """Timeouts, intervals and grace periods of a dispatcher and its outbox, in seconds."""

    # Time that a worker whose link broke has to connect again before its jobs go on elsewhere. A broken link is the
    # first sign of a death, within milliseconds.
    link_grace_s: float = 0.2
    # Time that a worker may be missing in Redis before its jobs go on elsewhere: two of its beats.
    liveness_grace_s: float = 1.0
    # Time without a message over its link after which such a worker counts as lost; it sends one every half second.
    silent_s: float = 2.0
    # Time that a job may be neither queued nor bound before it is dispatched again, since its claim may still be on its
    # way: the first such time, which doubles with each further one in a row.
    claim_grace_s: float = 1.0
    # Time that no live worker may be able to take a waiting job before the job ends: a worker may be restarting.
    unservable_grace_s: float = 5.0
    # Interval between looks into the queue for jobs that are in nobody's hands.
    look_s: float = 0.25
    # Time that an attempt waits in the queue before it is sealed anew.
    seal_s: float = SEALED_JOB_S / 2
    # Interval between attempts of an operation on a queue that does not answer.
    pause_s: float = 0.2
    # Time that a new job waits for a Redis that cannot be reached, which restarts or fails over; a client's own retries
    # are few when all of its calls fail at once.
    enqueue_s: float = CALL_S
    # Timeout for removing an ended job from Redis, and for adding a dead letter: an outage may be for good.
    finish_s: float = 60.0
    # Timeout for pending queue operations when the router stops.
    drain_s: float = 5.0
    # Time after which no enqueue that its call has given up can still reach Redis: the timeout of a whole call.
    late_enqueue_s: float = CALL_S


class WorkerLinks:
    """The links that are open now."""

    def __init__(self, timing: DispatchTiming | None = None) -> None:
        self._timing = timing or DispatchTiming()
        self._open: dict[str, WorkerLink] = {}
        # Since when an incarnation that has jobs of this router is not among the live ones in Redis.
        self._missing: dict[str, float] = {}

    @property
    def incarnations(self) -> AbstractSet[str]:
        """Return the incarnations that have an open link."""
        return self._open.keys()

    def up(self, link: WorkerLink) -> None:
        """Take a link that was opened; it replaces an earlier one of its incarnation."""
        self._open[link.incarnation] = link

    def down(self, link: WorkerLink) -> bool:
        """Forget a link that broke; returns whether its incarnation has no other one."""
        if self._open.get(link.incarnation) is not link:
            return False
        del self._open[link.incarnation]
        return True

    def lost(self, bound: AbstractSet[str], living: AbstractSet[str]) -> set[str]:
        """Return the incarnations in `bound` (with jobs) that count as lost, given those that Redis lists as alive.

        A worker that is cut off from Redis alone goes on, so its link must be silent too: workers with jobs send
        something every half second. One look is not enough: a Redis that lost data knows no worker until they beat.
        """
        now = time.monotonic()
        self._missing = {missing: self._missing.get(missing, now) for missing in bound - living}
        return {
            missing
            for missing, since in self._missing.items()
            if now - since >= self._timing.liveness_grace_s and self._silent_s(missing, now) >= self._timing.silent_s
        }

    def _silent_s(self, incarnation: str, now: float) -> float:
        link = self._open.get(incarnation)
        return math.inf if link is None else now - link.heard_at


# Time in seconds that a live worker may be without a link to this router before it counts as not reaching it. Longer
# than a dead worker is listed in Redis (its time to live of 3 s, and a look): its death is no sign of a bad address.
UNREACHED_S = 4.0


class RelayReach:
    """The live workers that have no link to one router."""

    def __init__(self, metrics: RouterMetrics | None = None, *, clock: Callable[[], float] | None = None) -> None:
        self.links = WorkerLinks()
        self._metrics = metrics or RouterMetrics()
        self._clock = clock or time.monotonic
        # Address of this router's relay, as workers are told; set once it listens.
        self.address = ""
        # Since when a live worker, by its incarnation, has no link.
        self._unlinked_since: dict[str, float] = {}
        self._last_logged: frozenset[str] = frozenset()
        # Models whose live workers all have no link, and these workers' incarnations.
        self._cut_off: dict[str, frozenset[str]] = {}
        self._some_model_reached = True

    def linked(self, states: Sequence[WorkerState]) -> list[WorkerState]:
        """Return the workers that may claim jobs of this router."""
        open_links = self.links.incarnations
        return [state for state in states if state.incarnation in open_links]

    def look(self, serving: Mapping[str, Sequence[WorkerState]]) -> list[str]:
        """Take the live workers of each model; return the models whose workers have all had no link for long."""
        now, states = self._clock(), [state for of_model in serving.values() for state in of_model]
        linked = {state.incarnation for state in self.linked(states)}
        unlinked = {state.incarnation: state.worker_id for state in states if state.incarnation not in linked}
        self._unlinked_since = {one: self._unlinked_since.get(one, now) for one in unlinked}
        late = frozenset(one for one, since in self._unlinked_since.items() if now - since >= UNREACHED_S)
        self._metrics.unlinked_workers.set(len(late))
        for incarnation in sorted(late - self._last_logged):
            log.warning(
                "worker %s is alive and has had no link to this router's relay at %s for %g s, so it claims no jobs of "
                "this router: can it reach that address? --relay-advertise sets it",
                *(unlinked[incarnation], self.address, UNREACHED_S),
            )
        self._last_logged = late
        incarnations_of = {
            name: frozenset(state.incarnation for state in of_model) for name, of_model in serving.items()
        }
        cut_off = {
            name: incarnations
            for name, incarnations in incarnations_of.items()
            if incarnations and incarnations <= late
        }
        for name in sorted(cut_off.keys() ^ self._cut_off.keys()):
            if name in cut_off:
                log.error("no worker of %s reaches this router's relay at %s: requests are refused", name, self.address)
            else:
                log.info("requests for %s are not refused for want of a link any more", name)
        self._cut_off = cut_off
        self._some_model_reached = not cut_off or any(
            incarnations_of[name] for name in incarnations_of.keys() - cut_off.keys()
        )
        return sorted(cut_off)

    def forget(self) -> None:
        """Judge nobody for now: it is not known which workers live."""
        self._unlinked_since, self._cut_off, self._some_model_reached = {}, {}, True

    def check(self, model: str) -> None:
        """Raise Unavailable where no worker could claim a job of the model."""
        cut_off = self._cut_off.get(model)
        if cut_off is not None and cut_off.isdisjoint(self.links.incarnations):
            raise self.refusal(model)

    def refusal(self, model: str) -> Unavailable:
        """Return, and count, the error of a request that no worker can claim."""
        self._metrics.unreachable.inc()
        message = f"no worker of {model} reaches this router's relay at {self.address}"
        return Unavailable(message, reason="RELAY_UNREACHABLE")

    def waits_for(self) -> str:
        """Return what is missing for a model to be served; empty: nothing."""
        return "" if self._some_model_reached else f"a worker that reaches this router's relay at {self.address}"
