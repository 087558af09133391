"""Converts domain objects to the bytes that Redis carries (queue.v1) and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain

from google.protobuf.message import DecodeError
from loraplex.inference.v1 import inference_pb2
from loraplex.queue.v1 import queue_pb2

from broker.messages import AdapterRef, AdapterRequest, DeadJob, Job, WeightedRef
from broker.worker_state import AdapterTiers, WorkerPhase, WorkerState
from options import Encode, Pooling, SamplingParams, StoppingParams, Task

# Number of ids that are converted at once: between two such pieces a thread gives way to the event loop.
_PIECE = 4_096
# Maximum number of answers of a job, far above what routers admit: a worker keeps a record of each.
MAX_ANSWERS = 256

_PHASES = {
    WorkerPhase.SERVING: queue_pb2.WORKER_PHASE_SERVING,
    WorkerPhase.DRAINING: queue_pb2.WORKER_PHASE_DRAINING,
    WorkerPhase.FAILING: queue_pb2.WORKER_PHASE_FAILING,
}
_FROM_PHASE = {number: phase for phase, number in _PHASES.items()}
_TASKS: dict[Task, queue_pb2.EncodeTask.ValueType] = {
    "embed": queue_pb2.ENCODE_TASK_EMBED,
    "classify": queue_pb2.ENCODE_TASK_CLASSIFY,
}
_POOLINGS: dict[Pooling, inference_pb2.Pooling.ValueType] = {
    "": inference_pb2.POOLING_UNSPECIFIED,
    "cls": inference_pb2.POOLING_CLS,
    "mean": inference_pb2.POOLING_MEAN,
    "last": inference_pb2.POOLING_LAST,
}
_FROM_TASK = {number: task for task, number in _TASKS.items()}
_FROM_POOLING = {number: pooling for pooling, number in _POOLINGS.items()}


def encode_job(job: Job) -> bytes:
    """Encode a job."""
    message = queue_pb2.Job(
        job_id=job.job_id,
        request_id=job.request_id,
        tenant=job.tenant,
        model=job.model,
        base_digest=job.base_digest,
        attempt=job.attempt,
        reply_to=job.reply_to,
        prompt_ids=job.prompt_ids,
        sampling=_write_sampling(job.sampling),
        stopping=queue_pb2.StoppingParams(
            max_tokens=job.stopping.max_tokens,
            min_tokens=job.stopping.min_tokens,
            stop_token_ids=job.stopping.stop_token_ids,
            ignore_eos=job.stopping.ignore_eos,
        ),
        n=job.n,
        priority=job.priority,
        deadline_ms=job.deadline_ms,
        strikes=job.strikes,
        logprobs=job.logprobs,
        prompt_logprobs=job.prompt_logprobs,
        prompt_logprobs_start=job.prompt_logprobs_start,
        done=job.done,
        traceparent=job.traceparent,
        resumed=job.resumed,
        weight=job.weight,
        grammar=job.grammar,
    )
    for choice, ids in sorted(job.emitted.items()):
        emitted = message.emitted.add(choice=choice)
        for at in range(0, len(ids), _PIECE):
            emitted.token_ids.extend(ids[at : at + _PIECE])
    if job.adapter:
        message.adapter.CopyFrom(_write_adapter(job.adapter))
    if encode := job.encode:
        message.encode.task, message.encode.pooling = _TASKS[encode.task], _POOLINGS[encode.pooling]
        message.encode.pair_tokens = encode.pair_tokens
    return message.SerializeToString()


def read_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """Return the ids in a message; of many it may run in a thread."""
    return tuple(chain.from_iterable(ids[at : at + _PIECE] for at in range(0, len(ids), _PIECE)))


def decode_job(data: bytes) -> Job:
    """Decode a job. Raises google.protobuf.message.DecodeError, also for a sealed one."""
    message = queue_pb2.Job.FromString(data)
    if not message.job_id and not message.HasField("sealed"):
        raise DecodeError("the job has no id")
    if message.n > MAX_ANSWERS:
        raise DecodeError(f"n: {message.n} answers; a job has at most {MAX_ANSWERS}")
    if not 0 < message.weight < math.inf:  # a worker divides by it
        raise DecodeError(f"weight: {message.weight:g} is not a finite number above 0")
    if message.HasField("sealed"):
        raise DecodeError("the job is sealed, and this process runs without credentials")
    return Job(
        job_id=message.job_id,
        request_id=message.request_id,
        tenant=message.tenant,
        model=message.model,
        base_digest=message.base_digest,
        attempt=message.attempt,
        reply_to=message.reply_to,
        adapter=_read_adapter(message.adapter) if message.HasField("adapter") else None,
        prompt_ids=tuple(message.prompt_ids),
        emitted={emitted.choice: read_ids(emitted.token_ids) for emitted in message.emitted},
        sampling=_read_sampling(message.sampling),
        stopping=StoppingParams(
            message.stopping.max_tokens,
            message.stopping.min_tokens,
            tuple(message.stopping.stop_token_ids),
            message.stopping.ignore_eos,
        ),
        n=message.n,
        priority=message.priority,
        deadline_ms=message.deadline_ms,
        strikes=message.strikes,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        prompt_logprobs_start=message.prompt_logprobs_start,
        done=tuple(message.done),
        traceparent=message.traceparent,
        resumed=message.resumed,
        weight=message.weight,
        grammar=message.grammar,
        encode=_read_encode(message.encode) if message.HasField("encode") else None,
    )


def _read_encode(message: queue_pb2.Encode) -> Encode:
    """Return what a job asks for. Raises DecodeError where a newer version asks for something unknown here."""
    if message.task not in _FROM_TASK or message.pooling not in _FROM_POOLING:
        raise DecodeError(f"encode: task {message.task} with pooling {message.pooling} is unknown")
    return Encode(_FROM_TASK[message.task], _FROM_POOLING[message.pooling], message.pair_tokens)


def encode_adapter_request(request: AdapterRequest) -> bytes:
    """Encode an adapter request."""
    return queue_pb2.Wanted(adapter=_write_adapter(request.adapter), tenant=request.tenant).SerializeToString()


def decode_adapter_request(data: bytes) -> AdapterRequest:
    """Decode an adapter request. Raises google.protobuf.message.DecodeError."""
    message = queue_pb2.Wanted.FromString(data)
    return AdapterRequest(_read_adapter(message.adapter), message.tenant)


_DEAD_FIELDS = tuple(DeadJob.__dataclass_fields__)


def encode_dead_job(dead: DeadJob) -> bytes:
    """Encode a dead letter; message and dataclass have the same field names."""
    return queue_pb2.DeadJob(**{name: getattr(dead, name) for name in _DEAD_FIELDS}).SerializeToString()


def decode_dead_job(data: bytes) -> DeadJob:
    """Decode a dead letter. Raises google.protobuf.message.DecodeError."""
    message = queue_pb2.DeadJob.FromString(data)
    return DeadJob(**{name: getattr(message, name) for name in _DEAD_FIELDS})


def _write_adapter(ref: AdapterRef) -> queue_pb2.AdapterRef:
    return queue_pb2.AdapterRef(
        revision=ref.revision,
        digest=ref.digest,
        rank=ref.rank,
        weight_bytes=ref.weight_bytes,
        grant=ref.grant,
        parts=[queue_pb2.WeightedRef(adapter=_write_adapter(part.adapter), weight=part.weight) for part in ref.parts],
    )


def _read_adapter(message: queue_pb2.AdapterRef) -> AdapterRef:
    parts = tuple(WeightedRef(_read_adapter(part.adapter), part.weight) for part in message.parts)
    return AdapterRef(message.revision, message.digest, message.rank, message.weight_bytes, parts, message.grant)


_SAMPLING_FIELDS = tuple(name for name in SamplingParams.__dataclass_fields__ if name != "logit_bias")


def _write_sampling(sampling: SamplingParams) -> inference_pb2.Sampling:
    plain = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS}
    return inference_pb2.Sampling(logit_bias=dict(sampling.logit_bias), **plain)


def _read_sampling(message: inference_pb2.Sampling) -> SamplingParams:
    plain = {name: getattr(message, name) for name in _SAMPLING_FIELDS}
    return SamplingParams(logit_bias=tuple(sorted(message.logit_bias.items())), **plain)


_STATE_FIELDS = tuple(name for name in WorkerState.__dataclass_fields__ if name not in {"phase", "adapters", "tiers"})


def encode_worker(state: WorkerState) -> bytes:
    """Encode a worker's state; message and dataclass have the same field names."""
    plain = {name: getattr(state, name) for name in _STATE_FIELDS}
    tiers = queue_pb2.AdapterTiers(**asdict(state.tiers))
    return queue_pb2.WorkerState(
        phase=_PHASES[state.phase], adapters=state.adapters, tiers=tiers, **plain
    ).SerializeToString()


def decode_worker(data: bytes) -> WorkerState:
    """Decode a worker's state. Raises google.protobuf.message.DecodeError."""
    message = queue_pb2.WorkerState.FromString(data)
    plain = {name: getattr(message, name) for name in _STATE_FIELDS}
    phase = _FROM_PHASE.get(message.phase, WorkerPhase.DRAINING)
    tiers = AdapterTiers(**{name: getattr(message.tiers, name) for name in AdapterTiers.__dataclass_fields__})
    return WorkerState(phase=phase, adapters=tuple(message.adapters), tiers=tiers, **plain)
