"""Converts domain objects to the bytes that Redis carries (queue.v1) and back.

Message and dataclass have the same field names; what differs in type is converted by name here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, get_args

from google.protobuf.message import DecodeError
from loraplex.inference.v1 import inference_pb2
from loraplex.queue.v1 import queue_pb2

from broker.messages import (
    AdapterRef,
    AdapterRequest,
    AdapterTiers,
    DeadJob,
    Job,
    WeightedRef,
    WorkerPhase,
    WorkerState,
)
from options import Encode, Pooling, SamplingParams, StoppingParams, Task

# Number of ids that are converted at once: between two such pieces a thread gives way to the event loop.
_PIECE = 4_096
# Maximum number of answers of a job, far above what routers admit: a worker keeps a record of each.
MAX_ANSWERS = 256

_PHASES = {phase: queue_pb2.WorkerPhase.Value(f"WORKER_PHASE_{phase.name}") for phase in WorkerPhase}
_TASKS = {task: queue_pb2.EncodeTask.Value(f"ENCODE_TASK_{task.upper()}") for task in get_args(Task)}
_POOLINGS = {
    pooling: inference_pb2.Pooling.Value(f"POOLING_{pooling.upper() or 'UNSPECIFIED'}") for pooling in get_args(Pooling)
}
_FROM_PHASE = {number: phase for phase, number in _PHASES.items()}
_FROM_TASK: dict[int, Task] = {number: task for task, number in _TASKS.items()}
_FROM_POOLING: dict[int, Pooling] = {number: pooling for pooling, number in _POOLINGS.items()}


def _names(kind: type, *others: str) -> tuple[str, ...]:
    """Return the names of a dataclass's fields but for those of `others`."""
    return tuple(name for name in kind.__dataclass_fields__ if name not in others)  # type: ignore[attr-defined]


def _values(record: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


_JOB_FIELDS = _names(Job, "adapter", "emitted", "sampling", "stopping", "encode")
_ADAPTER_FIELDS = _names(AdapterRef, "parts")
_SAMPLING_FIELDS = _names(SamplingParams, "logit_bias")
_STOPPING_FIELDS = _names(StoppingParams)
_DEAD_FIELDS = _names(DeadJob)
_STATE_FIELDS = _names(WorkerState, "phase", "tiers")
_TIER_FIELDS = _names(AdapterTiers)


def encode_job(job: Job) -> bytes:
    """Encode a job."""
    message = queue_pb2.Job(
        sampling=_write_sampling(job.sampling),
        stopping=queue_pb2.StoppingParams(**_values(job.stopping, _STOPPING_FIELDS)),
        **_values(job, _JOB_FIELDS),
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
    if message.HasField("sealed"):
        raise DecodeError("the job is sealed, and this process runs without credentials")
    if not message.job_id:
        raise DecodeError("the job has no id")
    if message.n > MAX_ANSWERS:
        raise DecodeError(f"n: {message.n} answers; a job has at most {MAX_ANSWERS}")
    if not 0 < message.weight < math.inf:  # a worker divides by it
        raise DecodeError(f"weight: {message.weight:g} is not a finite number above 0")
    tuples = {"prompt_ids": tuple(message.prompt_ids), "done": tuple(message.done)}
    fields = _values(message, _JOB_FIELDS) | tuples
    for name in ("logprobs", "prompt_logprobs"):
        if not message.HasField(name):
            fields[name] = None
    stopping = _values(message.stopping, _STOPPING_FIELDS)
    return Job(
        adapter=_read_adapter(message.adapter) if message.HasField("adapter") else None,
        emitted={emitted.choice: read_ids(emitted.token_ids) for emitted in message.emitted},
        sampling=_read_sampling(message.sampling),
        stopping=StoppingParams(**stopping | {"stop_token_ids": tuple(message.stopping.stop_token_ids)}),
        encode=_read_encode(message.encode) if message.HasField("encode") else None,
        **fields,
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


def encode_dead_job(dead: DeadJob) -> bytes:
    """Encode a dead letter."""
    return queue_pb2.DeadJob(**_values(dead, _DEAD_FIELDS)).SerializeToString()


def decode_dead_job(data: bytes) -> DeadJob:
    """Decode a dead letter. Raises google.protobuf.message.DecodeError."""
    return DeadJob(**_values(queue_pb2.DeadJob.FromString(data), _DEAD_FIELDS))


def _write_adapter(ref: AdapterRef) -> queue_pb2.AdapterRef:
    parts = [queue_pb2.WeightedRef(adapter=_write_adapter(part.adapter), weight=part.weight) for part in ref.parts]
    return queue_pb2.AdapterRef(parts=parts, **_values(ref, _ADAPTER_FIELDS))


def _read_adapter(message: queue_pb2.AdapterRef) -> AdapterRef:
    parts = tuple(WeightedRef(_read_adapter(part.adapter), part.weight) for part in message.parts)
    return AdapterRef(parts=parts, **_values(message, _ADAPTER_FIELDS))


def _write_sampling(sampling: SamplingParams) -> inference_pb2.Sampling:
    return inference_pb2.Sampling(logit_bias=dict(sampling.logit_bias), **_values(sampling, _SAMPLING_FIELDS))


def _read_sampling(message: inference_pb2.Sampling) -> SamplingParams:
    logit_bias = tuple(sorted(message.logit_bias.items()))
    return SamplingParams(logit_bias=logit_bias, **_values(message, _SAMPLING_FIELDS))


def encode_worker(state: WorkerState) -> bytes:
    """Encode a worker's state."""
    tiers = queue_pb2.AdapterTiers(**asdict(state.tiers))
    message = queue_pb2.WorkerState(phase=_PHASES[state.phase], tiers=tiers, **_values(state, _STATE_FIELDS))
    return message.SerializeToString()


def decode_worker(data: bytes) -> WorkerState:
    """Decode a worker's state. Raises google.protobuf.message.DecodeError."""
    message = queue_pb2.WorkerState.FromString(data)
    fields = _values(message, _STATE_FIELDS) | {"adapters": tuple(message.adapters)}
    phase = _FROM_PHASE.get(message.phase, WorkerPhase.DRAINING)
    return WorkerState(phase=phase, tiers=AdapterTiers(**_values(message.tiers, _TIER_FIELDS)), **fields)
