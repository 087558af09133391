"""The frames of relay messages, built from local jobs, and when they are due."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

import grpc

from loraplex.contracts.options import FinishReason, TokenLogprobs
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.worker.engine_api import Failure
from loraplex.worker.io.local_jobs import LocalChoice, LocalJob

_KINDS = {
    FinishReason.LENGTH: pb.FINISH_KIND_LENGTH,
    FinishReason.END: pb.FINISH_KIND_END,
    FinishReason.STOP: pb.FINISH_KIND_STOP_TOKEN,
    FinishReason.COMPLETE: pb.FINISH_KIND_COMPLETE,
}
# Bytes of frames after which a message takes no further one, and maximum ids of a frame: about 256 KiB with the most
# log probabilities, which takes 6 ms to build. A rewind may ask for whole answers of many jobs: this worker does
# other work between two messages, and a router reads others between them.
MESSAGE_BYTES = 256 * 1024
FRAME_TOKENS = 1_024
_CODES = {code.name: code.value[0] for code in grpc.StatusCode}


def attempt_of(local: LocalJob) -> pb.JobAttempt:
    """Return a job's name on the relay."""
    return pb.JobAttempt(job_id=local.job.job_id, attempt=local.job.attempt)


def add_frames(progress: dict[LocalChoice, None], batch: pb.FrameBatch) -> None:
    """Add the frames of one message, and take their answers out of the progress unless they have more to send."""
    size = 0
    while progress and size < MESSAGE_BYTES:
        choice = next(iter(progress))
        size += add_frame(choice, batch).ByteSize()
        if choice.sent == len(choice.ids):
            del progress[choice]


def add_frame(choice: LocalChoice, batch: pb.FrameBatch) -> pb.Frame:
    """Add a frame of an answer's new tokens; the last frame carries the finish reason."""
    end = choice.sent + FRAME_TOKENS
    frame = batch.frames.add(
        job_id=choice.job.job_id,
        attempt=choice.job.attempt,
        choice=choice.choice,
        offset=choice.start + choice.sent,
        token_ids=choice.ids[choice.sent : end],
    )
    if choice.logprobs:
        _add_logprobs(choice.logprobs[choice.sent : end], frame.logprobs.add)
    if choice.sent == 0:
        frame.first.adapter_ms = choice.adapter_ms
        frame.first.cached_tokens = choice.cached_tokens
        frame.first.MergeFromString(bytes(choice.prompt_logprobs))
    if (drafts := choice.drafts).steps:
        frame.drafts.steps, frame.drafts.tokens, frame.drafts.accepted = drafts.steps, drafts.tokens, drafts.accepted
    choice.sent = min(end, len(choice.ids))
    if choice.ending is None or choice.sent < len(choice.ids):
        return frame
    if choice.ending.kind is not None:
        frame.finish.kind = _KINDS[choice.ending.kind]
        frame.vector.extend(choice.vector)
    elif choice.ending.failure is not None:
        frame.finish.kind = pb.FINISH_KIND_FAILED
        frame.finish.failure.CopyFrom(_failure(choice.ending.failure))
    else:
        frame.finish.kind = pb.FINISH_KIND_RETURNED
        frame.finish.struck = choice.ending.blamed
    return frame


def returned_frame(job_id: str, attempt: int) -> pb.Frame:
    """Build the frame that returns a job unknown to this worker."""
    return pb.Frame(job_id=job_id, attempt=attempt, finish=pb.Finish(kind=pb.FINISH_KIND_RETURNED))


def encode_prompt(tokens: Iterable[TokenLogprobs]) -> bytes:
    """Encode log probabilities of a prompt for its first frame; what is encoded in parts is put one after the other."""
    first = pb.FirstToken()
    _add_logprobs(tokens, first.prompt_logprobs.add)
    return first.SerializeToString()


def _add_logprobs(tokens: Iterable[TokenLogprobs], add: Callable[..., object]) -> None:
    for token in tokens:
        ids, values = zip(*token.alternatives, strict=True) if token.alternatives else ((), ())
        add(logprob=token.logprob, token_ids=ids, logprobs=values)


def _failure(failure: Failure) -> pb.Failure:
    return pb.Failure(code=_CODES[failure.code], reason=failure.reason, message=failure.message, field=failure.field)


class SendThrottle:
    """Limits how often a link sends: `due` is set at once for an urgent frame, else `interval_s` after the last one."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = -math.inf
        self.due = asyncio.Event()

    def request(self, *, urgent: bool) -> None:
        """Set `due`, now or when the interval is over: there is something to send."""
        if self.due.is_set():
            return
        if urgent:
            self.due.set()
            return
        loop, at = asyncio.get_running_loop(), self._sent_at + self.interval_s
        if at <= loop.time():
            self.due.set()
        elif self._timer is None:
            self._timer = loop.call_at(at, self._interval_over)

    def sent(self) -> None:
        """Begin an interval: all frames were taken just now."""
        self.stop()
        self.due.clear()
        self._sent_at = asyncio.get_running_loop().time()

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _interval_over(self) -> None:
        self._timer = None
        self.due.set()
