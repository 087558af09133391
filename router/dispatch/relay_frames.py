"""Reads the frames in workers' messages."""

from __future__ import annotations

from loraplex.relay.v1 import relay_pb2 as pb

from router.dispatch.link import Frame, WorkerFinish
from router.request import TokenLogprobs
from rpc.errors import CallError
from rpc.status import to_error

_FINISHES = {
    pb.FINISH_KIND_LENGTH: WorkerFinish.LENGTH,
    pb.FINISH_KIND_END: WorkerFinish.END,
    pb.FINISH_KIND_STOP_TOKEN: WorkerFinish.STOP_TOKEN,
    pb.FINISH_KIND_COMPLETE: WorkerFinish.COMPLETE,
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
