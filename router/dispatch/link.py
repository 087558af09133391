"""A worker's link: the frames that come over it, and the messages that the router sends back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
from loraplex.relay.v1 import relay_pb2 as pb

from options import FinishKind, TokenLogprobs
from rpc.errors import CallError
from rpc.principal import Principal
from rpc.status import to_error


class Frame(msgspec.Struct, frozen=True):  # one is made for each token: a dataclass takes seven times as long
    """Tokens of one choice as a worker sends them. `failure` ends the job; `returned` gives it back.

    `blamed` counts a strike: the worker's engine died, perhaps of this job.
    """

    job_id: str
    attempt: int
    offset: int
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishKind | None = None
    failure: CallError | None = None
    returned: bool = False
    blamed: bool = False
    adapter_ms: float | None = None
    cached_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # The vector of a job that asks for one, with its end.
    vector: tuple[float, ...] = ()


class WorkerLink:
    """The router's end of the relay stream from one worker incarnation: the messages that go to it."""

    def __init__(self, worker_id: str, incarnation: str, worker: Principal | None = None, peer: str = "") -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        # The holder of the worker's certificate, None without credentials, and its address.
        self.worker, self.peer = worker, peer
        # Time of the monotonic clock at which the last message came.
        self.heard_at = time.monotonic()
        # Acks, cancels and rewinds for the next message. Any order will do: each ends or rewinds one attempt or choice.
        self._acks: list[pb.JobAttempt] = []
        self._cancels: list[pb.JobAttempt] = []
        self._rewinds: list[pb.Position] = []
        self._forgets: list[pb.Forget] = []
        self._interval_ms: int | None = None
        self._closed = False
        self._due = asyncio.Event()

    def ack(self, job_id: str, attempt: int) -> None:
        """Let the worker forget the job."""
        self._acks.append(pb.JobAttempt(job_id=job_id, attempt=attempt))
        self._due.set()

    def cancel(self, job_id: str, attempt: int, choice: int | None = None) -> None:
        """Make the worker stop the job, or one of its choices, and free what it holds."""
        self._cancels.append(pb.JobAttempt(job_id=job_id, attempt=attempt, choice=choice))
        self._due.set()

    def rewind(self, job_id: str, attempt: int, choice: int, offset: int) -> None:
        """Make the worker send a choice again from this offset."""
        self._rewinds.append(pb.Position(job_id=job_id, attempt=attempt, choice=choice, offset=offset))
        self._due.set()

    def pace(self, interval_ms: int) -> None:
        """Give the worker another interval between its messages."""
        self._interval_ms = interval_ms
        self._due.set()

    def forget(self, request: pb.Forget) -> None:
        """Ask the worker to remove what it has of a tenant."""
        self._forgets.append(request)
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
            if self._interval_ms is not None:
                interval_ms, self._interval_ms = self._interval_ms, None
                yield pb.ConnectResponse(pace=pb.Pace(interval_ms=interval_ms))
            if self._rewinds:
                positions, self._rewinds = self._rewinds, []
                yield pb.ConnectResponse(rewinds=pb.Rewinds(positions=positions))
            if self._cancels:
                cancels, self._cancels = self._cancels, []
                yield pb.ConnectResponse(cancels=pb.Cancels(jobs=cancels))
            if self._acks:
                acks, self._acks = self._acks, []
                yield pb.ConnectResponse(acks=pb.Acks(jobs=acks))
            while self._forgets:
                yield pb.ConnectResponse(forget=self._forgets.pop(0))
            if self._closed and not self._due.is_set():
                return


_FINISHES = {
    pb.FINISH_KIND_LENGTH: FinishKind.LENGTH,
    pb.FINISH_KIND_END: FinishKind.END,
    pb.FINISH_KIND_STOP_TOKEN: FinishKind.STOP_TOKEN,
    pb.FINISH_KIND_COMPLETE: FinishKind.COMPLETE,
}
_NO_FINISH = pb.Finish()
# Maximum tokens of a prompt whose log probabilities are read on the event loop, in some milliseconds.
_SHORT_PROMPT = 256


def is_long(frame: pb.Frame) -> bool:
    """Return whether a frame takes long to read: log probabilities of a long prompt, of 20 numbers a token."""
    return frame.HasField("first") and len(frame.first.prompt_logprobs) > _SHORT_PROMPT


def read_frame(frame: pb.Frame) -> Frame:
    """Return the frame in a message."""
    # Nearly all frames have neither a beginning nor an end, and every look into a message makes an object.
    if not (frame.HasField("finish") or frame.HasField("first")):
        logprobs = tuple(map(_logprobs, frame.logprobs))
        return Frame(frame.job_id, frame.attempt, frame.offset, tuple(frame.token_ids), frame.choice, logprobs)
    finish = frame.finish if frame.HasField("finish") else _NO_FINISH
    first = frame.first if frame.HasField("first") else None
    return Frame(
        job_id=frame.job_id,
        attempt=frame.attempt,
        offset=frame.offset,
        token_ids=tuple(frame.token_ids),
        choice=frame.choice,
        logprobs=tuple(map(_logprobs, frame.logprobs)),
        finish=_FINISHES.get(finish.kind),
        failure=_failure(finish.failure) if finish.kind == pb.FINISH_KIND_FAILED else None,
        returned=finish.kind == pb.FINISH_KIND_RETURNED,
        blamed=finish.struck,
        adapter_ms=first.adapter_ms if first else None,
        cached_tokens=first.cached_tokens if first else None,
        prompt_logprobs=tuple(map(_logprobs, first.prompt_logprobs)) if first else (),
        vector=tuple(frame.vector),
    )


def _logprobs(token: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(token.logprob, tuple(zip(token.token_ids, token.logprobs, strict=True)))


def _failure(failure: pb.Failure) -> CallError:
    return to_error(failure.code, failure.reason, failure.message, failure.field)
