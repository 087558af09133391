"""Dispatch: which attempt of which job is whose, and the one recovery operation.

A worker that dies, drains or loses its link, a claim that never shows: all are attempt + 1, with the prompt and the ids
emitted so far. A frame is taken only from the incarnation that the job's current attempt is bound to.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import Any

from broker.connection import REDIS_DOWN
from broker.messages import Job
from broker.queue import DeadlineUnattainableError, JobQueue, QueueFullError
from broker.terms import Placement
from router.track import Frame, Link, Track
from rpc.errors import AlreadyExists, DeadlinePassed, Exhausted, Unavailable

log = logging.getLogger(__name__)

# A broken link is the first sign of a death; this is how long the worker has to come back.
LINK_GRACE_S = 0.2
# A job that left the queue and was not bound in this time is dispatched again.
CLAIM_GRACE_S = 1.0
# So long a worker's key must have been away: two beats.
MISSING_S = 1.0
WATCH_S = 0.25
RETRY_S = 0.2
# When a client that was refused is to come back: about, so that they do not all come at once.
FULL_RETRY_S = 1.0


class Dispatcher:
    """The jobs that this router owns."""

    def __init__(self, queue_of: Callable[[str], JobQueue], place: Callable[[Job], Placement]) -> None:
        self._queue_of = queue_of
        self._place = place
        self._tracks: dict[str, Track] = {}
        # Tenant and request id of each.
        self._requests: set[tuple[str, str]] = set()
        # Since when an incarnation that has jobs of ours has not been among the living.
        self._missing: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # The live link of each incarnation.
        self._links: dict[str, Link] = {}

    @property
    def tracks(self) -> Iterable[Track]:
        """The jobs that run or wait now."""
        return tuple(self._tracks.values())

    @asynccontextmanager
    async def track(self, job: Job) -> AsyncIterator[Track]:
        """Dispatch a job; on leaving, whatever the reason, nothing of it is left queued or running.

        Raises AlreadyExists, Exhausted or Unavailable.
        """
        request = (job.tenant, job.request_id)
        if request in self._requests:
            raise AlreadyExists(f"request_id {job.request_id} is running", reason="REQUEST_ID_RUNNING")
        self._requests.add(request)
        track = self._tracks[job.job_id] = Track(job)
        try:
            # Nobody is to miss it meanwhile and dispatch it a second time, past the queue's limits.
            track.dispatching = True
            await self._admit(job)
            track.dispatching = False
            yield track
        finally:
            self._requests.discard(request)
            del self._tracks[job.job_id]
            self._spawn(self._release(track))

    async def _admit(self, job: Job) -> None:
        try:
            await self._queue_of(job.model).enqueue(job, self._place(job))
        except QueueFullError as error:
            whose = f"tenants/{error.whose}/queue" if error.whose else "queue"
            after_s = random.uniform(0.5, 1.5) * FULL_RETRY_S
            raise Exhausted(whose, f"the queue is full: {error}", retry_after_s=after_s, reason="QUEUE_FULL") from error
        except DeadlineUnattainableError as error:
            message, after_s = f"the deadline can't be met: {error}", random.uniform(0.5, 1.0) * error.wait_ms / 1e3
            raise Exhausted("deadline", message, retry_after_s=after_s, reason="DEADLINE_UNATTAINABLE") from error
        except REDIS_DOWN as error:
            log.warning("job %s: the queue does not answer: %r", job.job_id, error)
            raise Unavailable("the queue does not answer", reason="QUEUE_DOWN") from error

    async def _release(self, track: Track) -> None:
        job, link = track.job, track.link
        if link is not None:
            if not track.finished_by_worker:
                link.cancel(job.job_id, job.attempt)
            return
        try:
            await self._queue_of(job.model).finish(job.job_id, job.attempt)
        except REDIS_DOWN:  # a worker that claims it is told to stop it
            log.warning("job %s: the queue did not answer its end", job.job_id)

    # What the relay tells

    def link_up(self, link: Link, holds: Sequence[tuple[str, int]]) -> None:
        """A worker is there, perhaps again: it goes on with what is still its own and drops the rest."""
        self._links[link.incarnation] = link
        for job_id, attempt in holds:
            track = self._claimed(link, job_id, attempt)
            for index, choice in enumerate(track.choices if track else ()):
                if choice.ended:
                    link.cancel(job_id, attempt, index)
                else:
                    link.rewind(job_id, attempt, index, len(choice.emitted))
        held = {job_id for job_id, _ in holds}
        for track in self._bound_to({link.incarnation}):
            if track.job.job_id not in held:
                self._redispatch(track)

    def link_down(self, link: Link) -> None:
        """A link broke: its worker gets a moment to come back, then its jobs go on elsewhere."""
        if self._links.get(link.incarnation) is link:
            del self._links[link.incarnation]
            self._spawn(self._lapse(link))

    async def _lapse(self, link: Link) -> None:
        await asyncio.sleep(LINK_GRACE_S)
        if link.incarnation in self._links:
            return
        self._go_on({link.incarnation})

    def living(self, incarnations: AbstractSet[str]) -> None:
        """Who lives, by their keys in Redis: the second sign of a death, for workers whose link stays open.

        One look is none: a Redis that has just lost its data knows nobody until the next beats.
        """
        now = time.monotonic()
        bound = {track.link.incarnation for track in self._tracks.values() if track.link is not None}
        self._missing = {missing: self._missing.get(missing, now) for missing in bound - incarnations}
        self._go_on({missing for missing, since in self._missing.items() if now - since >= MISSING_S})

    def _go_on(self, lost: AbstractSet[str]) -> None:
        tracks = self._bound_to(lost)
        if tracks:
            log.warning("lost: worker incarnations %s; %d jobs go on elsewhere", ", ".join(sorted(lost)), len(tracks))
        for track in tracks:
            self._redispatch(track)

    def _bound_to(self, incarnations: AbstractSet[str]) -> list[Track]:
        tracks = self._tracks.values()
        return [t for t in tracks if t.link is not None and t.link.incarnation in incarnations and not t.ended]

    def claims(self, link: Link, jobs: Sequence[tuple[str, int]]) -> None:
        """A worker says that it has claimed these jobs."""
        for job_id, attempt in jobs:
            self._claimed(link, job_id, attempt)

    def _claimed(self, link: Link, job_id: str, attempt: int) -> Track | None:
        """The track, if this link has its current attempt now; the worker is told to stop it otherwise."""
        track = self._tracks.get(job_id)
        if track is not None and track.job.attempt == attempt and not track.ended and track.bind(link):
            return track
        link.cancel(job_id, attempt)
        return None

    def frame(self, link: Link, frame: Frame) -> None:
        """Tokens, or the end, of a job."""
        track = self._claimed(link, frame.job_id, frame.attempt)
        if track is None:
            return
        if frame.choice >= len(track.choices):
            log.warning("worker %s: job %s has no choice %d", link.worker_id, frame.job_id, frame.choice)
        elif not track.accept(frame):
            emitted = track.choices[frame.choice].emitted
            link.rewind(frame.job_id, frame.attempt, frame.choice, len(emitted))
        elif frame.returned:
            link.ack(frame.job_id, frame.attempt)
            self._redispatch(track)
        elif frame.failure is not None:
            track.fail(frame.failure)
            link.ack(frame.job_id, frame.attempt)
        elif track.finished_by_worker:
            link.ack(frame.job_id, frame.attempt)

    # Recovery

    def _redispatch(self, track: Track) -> None:
        if track.late:
            track.fail(DeadlinePassed("the deadline passed before the answer's end"))
            return
        track.next_attempt()
        if not track.dispatching:
            track.dispatching = True
            self._spawn(self._enqueue_again(track))

    async def _enqueue_again(self, track: Track) -> None:
        job_id, enqueued = track.job.job_id, 0
        try:
            while self._tracks.get(job_id) is track and enqueued < track.job.attempt:
                job = track.job
                try:
                    await self._queue_of(job.model).enqueue(job, self._place(job))
                    enqueued = job.attempt
                except (*REDIS_DOWN, QueueFullError) as error:
                    log.warning("job %s attempt %d waits for the queue: %s", job_id, job.attempt, error)
                    await asyncio.sleep(RETRY_S)
        finally:
            track.dispatching = False
            track.missing_since = None
        if self._tracks.get(job_id) is not track:  # it ended meanwhile
            await self._release(track)

    async def watch(self) -> None:
        """Forever: dispatch again what left the queue and never showed up at a worker."""
        while True:
            await asyncio.sleep(WATCH_S)
            unbound: dict[str, list[Track]] = {}
            for track in self._tracks.values():
                if track.link is None and not track.ended and not track.dispatching:
                    unbound.setdefault(track.job.model, []).append(track)
            for model, tracks in unbound.items():
                try:
                    waiting = await self._queue_of(model).waiting([track.job.job_id for track in tracks])
                except REDIS_DOWN:
                    continue
                self._check_missing(tracks, waiting)

    def _check_missing(self, tracks: Sequence[Track], waiting: Sequence[bool]) -> None:
        now = time.monotonic()
        for track, waits in zip(tracks, waiting, strict=True):
            if waits or track.link is not None or self._tracks.get(track.job.job_id) is not track:
                track.missing_since = None
            elif track.missing_since is None:
                track.missing_since = now
            elif now - track.missing_since >= CLAIM_GRACE_S:
                log.warning("job %s attempt %d was claimed and never bound", track.job.job_id, track.job.attempt)
                self._redispatch(track)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Wait until what was begun in the background is done."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
