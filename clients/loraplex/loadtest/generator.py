"""A generator: sends its share of a run's requests, every n-th, and measures its own cost."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from array import array
from collections import Counter, deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from loraplex.loadtest.arrivals import Closed, Open, arrival_times
from loraplex.loadtest.plan import LoadPlan
from loraplex.loadtest.samples import STOPPED, Outcome, Recorder, Samples
from loraplex.loadtest.sender import Call, RequestFailure, Sender
from loraplex.loadtest.workload import LoadRequest, Workload

# Timeout in seconds of a run in which every request fails to connect.
GIVE_UP_S = 5.0
# Pause in seconds of a refused client in a closed loop, unless the server says how long to wait.
_PAUSE_S = 0.1
# Interval in seconds of the samples of the event loop's lateness.
_PROBE_S = 0.02
# Maximum number of the latest requests and gaps that a progress message has.
_RECENT = 512


@dataclass(frozen=True)
class LoadProgress:
    """A process's progress: counts since the start of the run, `recent_*` of the last requests and messages."""

    at_s: float
    sent: int
    running: int
    tokens: int
    statuses: dict[str, int]
    recent_ttft_s: tuple[float, ...]
    recent_gap_s: tuple[float, ...]


@dataclass(frozen=True)
class Share:
    """A process's results. `delays_s` are samples of how late its event loop woke up."""

    samples: Samples
    cpu_s: float
    wall_s: float
    delays_s: array[float]
    never_sent: int
    # Time at which the process gave up because nothing answered; nan if it did not.
    gave_up_s: float


class Generator:
    """Runs share `number` of `count` of a plan."""

    def __init__(self, plan: LoadPlan, workload: Workload, sender: Sender, number: int, count: int) -> None:
        self._plan = plan
        self._workload = workload
        self._sender = sender
        self._number = number
        self._count = count
        self._recorder = Recorder()
        self._stopping = False
        self._arriving: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running: dict[int, Outcome] = {}
        self._sent = 0
        self._due = 0
        self._tokens = 0
        self._statuses: Counter[str] = Counter()
        self._recent_ttft_s: deque[float] = deque(maxlen=_RECENT)
        self._recent_gap_s: deque[float] = deque(maxlen=_RECENT)
        self._unreachable_since_s = float("nan")
        self._gave_up_s = float("nan")

    async def run(self) -> Share:
        """Send all requests, and return when every one has ended."""
        await asyncio.sleep(max(0.0, -self._sender.now_s()))
        cpu_s, wall_s = time.process_time(), time.monotonic()
        delays_s = array("d")
        probe = asyncio.create_task(_probe(delays_s))
        arrivals = self._plan.arrivals
        self._arriving = asyncio.create_task(
            self._closed(arrivals) if isinstance(arrivals, Closed) else self._open(arrivals)
        )
        await asyncio.gather(self._arriving, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        probe.cancel()
        for outcome in list(self._running.values()):  # These were cancelled before they had begun.
            outcome.status, outcome.end_s = STOPPED, self._sender.now_s()
            outcome.sent_s = outcome.end_s
            self._record(outcome)
        if not self._arriving.cancelled():
            self._arriving.result()
        return Share(
            self._recorder.samples(),
            time.process_time() - cpu_s,
            time.monotonic() - wall_s,
            delays_s,
            max(0, self._due - self._sent),
            self._gave_up_s,
        )

    def stop(self) -> None:
        """Stop sending and cancel running requests; `run` then returns."""
        self._send_no_more()
        for task in self._tasks:
            task.cancel()

    def _send_no_more(self) -> None:
        self._stopping = True
        if self._arriving is not None:
            self._arriving.cancel()

    def progress(self) -> LoadProgress:
        """Return the progress so far."""
        return LoadProgress(
            self._sender.now_s(),
            self._sent,
            self._sent - self._statuses.total(),
            self._tokens,
            dict(self._statuses),
            tuple(self._recent_ttft_s),
            tuple(self._recent_gap_s),
        )

    async def _open(self, arrivals: Open) -> None:
        """Send each request at its time, however many are running."""
        times = arrival_times(arrivals, self._plan.extent, self._plan.seed)
        mine = range(self._number, len(times), self._count)
        self._due = len(mine)
        for index in mine:
            request = self._workload.request(index)
            call = self._sender.prepare(request)
            due_s = float(times[index])
            wait_s = due_s - self._sender.now_s()
            # Late requests are sent at once, with arrived messages read in between.
            await asyncio.sleep(max(0.0, wait_s))
            self._spawn(self._one(call, self._begin(request, due_s)))

    async def _closed(self, arrivals: Closed) -> None:
        sharing = min(self._count, arrivals.concurrency)  # A process without a client has no requests either.
        if self._number >= sharing:
            return
        indices: Iterator[int] = itertools.count(self._number, sharing)
        if self._plan.extent.total_requests is not None:
            mine = range(self._number, self._plan.extent.total_requests, sharing)
            self._due, indices = len(mine), iter(mine)
        for _ in range(self._number, arrivals.concurrency, sharing):
            self._spawn(self._client(indices))

    async def _client(self, indices: Iterator[int]) -> None:
        """Send one request after the other, as a client of a closed loop."""
        total_s = self._plan.extent.total_s or float("inf")
        while not self._stopping and self._sender.now_s() < total_s:
            index = next(indices, None)
            if index is None:
                return
            request = self._workload.request(index)
            call = self._sender.prepare(request)
            error = await self._one(call, self._begin(request, self._sender.now_s()))
            if error is not None and error.refused:
                await asyncio.sleep(random.uniform(1.0, 1.25) * (error.retry_after_s or _PAUSE_S))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin(self, request: LoadRequest, intended_s: float) -> Outcome:
        self._sent += 1
        adapter = -1 if request.adapter is None else request.adapter
        # Timers have a resolution of a millisecond: a request may be sent early, and then it is due early.
        outcome = Outcome(request.index, request.tenant, adapter, min(intended_s, self._sender.now_s()), math.nan)
        self._running[request.index] = outcome
        return outcome

    async def _one(self, call: Call, outcome: Outcome) -> RequestFailure | None:
        outcome.sent_s = self._sender.now_s()
        try:
            error = await self._sender.send(call, outcome)
        finally:
            self._record(outcome)
        self._watch(outcome, error)
        return error

    def _record(self, outcome: Outcome) -> None:
        del self._running[outcome.index]
        self._recorder.add(outcome)
        self._statuses[outcome.status] += 1
        self._tokens += outcome.tokens
        if outcome.messages:
            self._recent_ttft_s.append(outcome.first_s - outcome.intended_s)
            self._recent_gap_s.extend(outcome.gaps_s)

    def _watch(self, outcome: Outcome, error: RequestFailure | None) -> None:
        """Stop the run when nothing has answered, not even with a refusal, for the timeout."""
        if error is None or not error.unreachable or outcome.messages:
            self._unreachable_since_s = float("nan")
        elif math.isnan(self._unreachable_since_s):
            self._unreachable_since_s = outcome.end_s
        elif outcome.end_s - self._unreachable_since_s > GIVE_UP_S and not self._stopping:
            self._gave_up_s = outcome.end_s
            self._send_no_more()


async def _probe(delays_s: array[float]) -> None:
    """Sample how late the event loop wakes up, until cancelled: messages are read late by as much."""
    while True:
        began_s = time.monotonic()
        await asyncio.sleep(_PROBE_S)
        delays_s.append(max(0.0, time.monotonic() - began_s - _PROBE_S))
