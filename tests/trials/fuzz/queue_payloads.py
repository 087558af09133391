"""Reads what Redis carries as workers and routers do: whoever can write to Redis must not end one."""

from __future__ import annotations

import contextlib

from msgspec import DecodeError

from loraplex.contracts.broker.commands import Command, Verb, decode_command, encode_command
from loraplex.contracts.broker.messages import (
    AdapterRef,
    AdapterRequest,
    DeadJob,
    Job,
    WorkerPhase,
    WorkerState,
    decode_job,
    decode_record,
    encode_record,
)
from loraplex.contracts.options import Encode, StoppingParams
from loraplex.relay.v1 import relay_pb2
from loraplex.router.api.cluster import dead_job_message, worker_message
from loraplex.worker.engine.scheduling.sequence import check_sequence
from loraplex.worker.engine_api import EngineLimits, SequenceRefusedError
from loraplex.worker.io.local_jobs import LocalJobs, sequence_of
from loraplex.worker.io.relay.frames import add_frame, attempt_of

_LIMITS = EngineLimits(rows=8, max_tokens=1024, max_rank=64, vocab_size=512, block_size=16, blocks=64, adapter_slots=4)
ADAPTER = AdapterRef("tenants/acme/adapters/a/revisions/sha256:" + "0" * 64, "sha256:" + "0" * 64, 8, 1024)
_JOB = Job("j", "acme", "hash", "sha256:" + "1" * 64, "127.0.0.1:1", (1, 2, 3), StoppingParams(max_tokens=8))
JOBS = (
    encode_record(_JOB),
    encode_record(
        Job(
            "k",
            "acme",
            "hash",
            "sha256:" + "1" * 64,
            "127.0.0.1:1",
            (1, 2),
            StoppingParams(4, 1, (9,), True),
            adapter=ADAPTER,
            emitted={0: (5, 6), 1: ()},
            n=3,
            logprobs=2,
            prompt_logprobs=0,
            done=(2,),
            grammar="start: /a/",
        )
    ),
    encode_record(
        Job("e", "acme", "hash", "sha256:" + "1" * 64, "a:1", (1,), StoppingParams(0), encode=Encode("embed", "mean"))
    ),
)
STATE = WorkerState(
    worker_id="w",
    incarnation="i",
    phase=WorkerPhase.SERVING,
    model="hash",
    base_digest="sha256:" + "1" * 64,
    rows_running=1,
    rows_waiting=0,
    rows_limit=8,
    blocks_total=64,
    blocks_free=60,
    blocks_cached=2,
    blocks_referenced=2,
    slots_total=4,
    slots_used=1,
    slots_pinned=0,
    adapters=("a",),
    max_rank=64,
    max_tokens=1024,
    steps=9,
    host="h",
    pid=1,
    engine_pid=2,
)
_DEAD = DeadJob("j", "r", "acme", "hash", "", 3, 1, 2, "ENGINE_KILLED", 0)
PAYLOADS = (
    encode_command(Command(Verb.PIN, AdapterRequest(ADAPTER, "acme"))),
    b"drain",
    encode_record(STATE),
    encode_record(_DEAD),
    *JOBS,
)


def read_payload(data: bytes) -> None:
    """Read a command, a worker's state, a dead letter and an adapter request, and show them as routers do."""
    for read in (
        lambda: decode_command(data),
        lambda: worker_message(decode_record(WorkerState, data), "main"),
        lambda: dead_job_message(decode_record(DeadJob, data)),
        lambda: hash(decode_record(AdapterRequest, data)),
    ):
        with contextlib.suppress(DecodeError):
            read()


def read_job(data: bytes) -> None:
    """Take a job as a worker does, up to the engine's own check, and name it to its router."""
    local = LocalJobs().add(decode_job(data))
    attempt_of(local)
    hash(local.job.adapter)
    for choice in local.choices.values():
        add_frame(choice, relay_pb2.FrameBatch())
        try:
            check_sequence(sequence_of(choice, None), _LIMITS)
        except SequenceRefusedError:
            continue
