"""Frames of long answers: several messages, none of them large, and nothing lost between them."""

from __future__ import annotations

import pytest

from loraplex.contracts.broker.messages import Job
from loraplex.contracts.options import (
    NO_DRAFTS,
    DraftCounts,
    Encode,
    FinishReason,
    SamplingParams,
    StoppingParams,
    TokenLogprobs,
)
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.router.dispatch.links import read_frame
from loraplex.worker.engine.scheduling.sequence import check_sequence
from loraplex.worker.engine_api import AdapterSource, EngineLimits, Output, SequenceRefusedError
from loraplex.worker.io.local_jobs import LocalChoice, LocalJobs, sequence_of
from loraplex.worker.io.relay.frames import FRAME_TOKENS, MESSAGE_BYTES, add_frames

LENGTH = 2 * FRAME_TOKENS + 5


def ended_answers(count: int) -> list[LocalChoice]:
    jobs = LocalJobs()
    choices = []
    for number in range(count):
        job = Job(
            f"j{number}",
            "acme",
            "tiny",
            "sha256:0",
            "router",
            (1,),
            StoppingParams(LENGTH),
            sampling=SamplingParams(seed=1),
        )
        choice = jobs.add(job).choices[0]
        logprobs = (TokenLogprobs(-1.0, ((1 << 31, -1.0),) * 20),) * LENGTH
        choice.hand_over(number + 1, 0.0)
        choice.begin()
        choice.record(Output(choice.sequence_id, 0, tuple(range(LENGTH)), FinishReason.LENGTH, logprobs=logprobs))
        choices.append(choice)
    return choices


def test_a_vector_goes_with_the_end_and_again_after_a_rewind() -> None:
    vector = (0.5, -1.0, 0.25)
    asking = Job(
        "j",
        "acme",
        "tiny",
        "sha256:0",
        "router",
        (1,),
        StoppingParams(0),
        sampling=SamplingParams(seed=1),
        encode=Encode("embed"),
    )
    choice = LocalJobs().add(asking).choices[0]
    assert sequence_of(choice, None).encode == asking.encode
    choice.hand_over(1, 0.0)
    choice.begin()
    choice.record(Output(choice.sequence_id, 0, (), FinishReason.LENGTH, cached_tokens=7, vector=vector), at_s=1.0)
    assert choice.first_at == 1.0
    for _ in range(2):
        add_frames({choice: None}, batch := pb.FrameBatch())
        (frame,) = batch.frames
        assert (tuple(frame.vector), frame.finish.kind, frame.offset) == (vector, pb.FINISH_KIND_LENGTH, 0)
        assert frame.first.cached_tokens == 7
        assert read_frame(frame).vector == vector
        choice.rewind(0)
        assert choice.has_news


def test_an_activated_adapter_without_a_place_is_refused_and_not_taken_for_one_at_the_beginning() -> None:
    """Read a job of an older router, which names no place; its prompt has the invocation at the beginning and end."""
    limits = EngineLimits(rows=1, max_tokens=64, max_rank=8, vocab_size=9, block_size=4, blocks=24, adapter_slots=1)
    adapter = AdapterSource("sha256:1", "somewhere", invocation=(1,))
    for source, place, taken in ((adapter, None, None), (adapter, 0, 0), (adapter, 2, 2), (None, None, 0)):
        asking = Job("j", "acme", "tiny", "sha256:0", "router", (1, 2, 1), StoppingParams(9), invoked_at=place)
        sequence = sequence_of(LocalJobs().add(asking).choices[0], source)
        if taken is None:
            with pytest.raises(SequenceRefusedError, match="the adapter is not invoked"):
                check_sequence(sequence, limits)
        else:
            check_sequence(sequence, limits)
            assert sequence.invoked_at == taken


def test_drafts_are_told_as_those_so_far_and_alike_after_a_rewind() -> None:
    choice = (
        LocalJobs()
        .add(Job("j", "acme", "tiny", "sha256:0", "router", (1,), StoppingParams(9), speculate=False))
        .choices[0]
    )
    assert not sequence_of(choice, None).speculate
    choice.hand_over(1, 0.0)
    choice.begin()

    def told() -> DraftCounts:
        add_frames({choice: None}, batch := pb.FrameBatch())
        return read_frame(batch.frames[0]).drafts

    choice.record(Output(choice.sequence_id, 0, (5,)))
    assert told() == NO_DRAFTS
    choice.record(Output(choice.sequence_id, 1, (6, 7, 8), drafted=4, accepted=2))
    choice.record(Output(choice.sequence_id, 4, (9,)))
    assert told() == DraftCounts(1, 4, 2)
    choice.record(Output(choice.sequence_id, 5, (9,), FinishReason.END, drafted=3, accepted=0))
    assert told() == DraftCounts(2, 7, 2)
    choice.rewind(0)
    assert told() == DraftCounts(2, 7, 2)


def test_whole_answers_with_log_probabilities_go_in_several_messages() -> None:
    choices = ended_answers(4)
    progress: dict[LocalChoice, None] = dict.fromkeys(choices)
    received: dict[str, list[int]] = {choice.job.job_id: [] for choice in choices}
    finished: list[str] = []
    messages = 0
    while progress:
        add_frames(progress, batch := pb.FrameBatch())
        frames = batch.frames
        messages += 1
        assert sum(frame.ByteSize() for frame in frames[:-1]) < MESSAGE_BYTES
        # So many take a loop, of worker or router, some 25 ms.
        assert sum(len(frame.logprobs) for frame in frames) <= 3 * FRAME_TOKENS <= 3_072
        for frame in frames:
            assert (frame.offset, len(frame.logprobs)) == (len(received[frame.job_id]), len(frame.token_ids))
            received[frame.job_id] += frame.token_ids
            if frame.HasField("finish"):
                finished.append(frame.job_id)
                assert received[frame.job_id] == list(range(LENGTH))
    assert messages > 1
    assert finished == [choice.job.job_id for choice in choices]
