"""What the relay carries of held jobs: the messages' parts, from the worker's own objects."""

from __future__ import annotations

import grpc
from loraplex.relay.v1 import relay_pb2 as pb

from worker.engine_api import Failure, FinishKind, TokenLogprobs
from worker.io.local_jobs.jobs import LocalChoice, LocalJob

_KINDS = {
    FinishKind.LENGTH: pb.FINISH_KIND_LENGTH,
    FinishKind.END: pb.FINISH_KIND_END,
    FinishKind.STOP_TOKEN: pb.FINISH_KIND_STOP_TOKEN,
}
_CODES = {code.name: code.value[0] for code in grpc.StatusCode}


def attempt_of(held: LocalJob) -> pb.JobAttempt:
    """Its name on the relay."""
    return pb.JobAttempt(job_id=held.job.job_id, attempt=held.job.attempt)


def next_frame(held: LocalChoice) -> pb.Frame:
    """What an answer has got since its last frame, and its end if it is there."""
    frame = pb.Frame(
        job_id=held.job.job_id,
        attempt=held.job.attempt,
        choice=held.choice,
        offset=held.start + held.sent,
        token_ids=held.ids[held.sent :],
        logprobs=map(_logprobs, held.logprobs[held.sent :]),
    )
    if held.sent == 0:
        frame.first.adapter_ms = held.adapter_ms
        frame.first.cached_tokens = held.cached_tokens
        frame.first.prompt_logprobs.extend(map(_logprobs, held.prompt_logprobs))
    held.sent = len(held.ids)
    if held.ending is None:
        return frame
    if held.ending.kind is not None:
        frame.finish.kind = _KINDS[held.ending.kind]
    elif held.ending.failure is not None:
        frame.finish.kind = pb.FINISH_KIND_FAILED
        frame.finish.failure.CopyFrom(_failure(held.ending.failure))
    else:
        frame.finish.kind = pb.FINISH_KIND_RETURNED
        frame.finish.struck = held.ending.struck
    return frame


def _logprobs(token: TokenLogprobs) -> pb.TokenLogprobs:
    ids, values = zip(*token.alternatives, strict=True) if token.alternatives else ((), ())
    return pb.TokenLogprobs(logprob=token.logprob, token_ids=ids, logprobs=values)


def _failure(failure: Failure) -> pb.Failure:
    return pb.Failure(code=_CODES[failure.code], reason=failure.reason, message=failure.message, field=failure.field)
