"""Test the requests that an engine refuses, and the field that it names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.worker.engine.scheduling.sequence import check_sequence
from loraplex.worker.engine_api import AdapterSource, EngineLimits, NewSequence, SequenceRefusedError

VOCAB = 50
LIMITS = EngineLimits(rows=4, max_tokens=64, max_rank=8, vocab_size=VOCAB, block_size=4, blocks=24, adapter_slots=2)
GOOD = NewSequence("new", (1, 2), stopping=StoppingParams(max_tokens=4))


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (replace(GOOD, sequence_id=""), "sequence_id"),
        (replace(GOOD, prompt_ids=()), "prompt_ids"),
        (replace(GOOD, prompt_ids=(1, VOCAB)), "prompt_ids"),
        (replace(GOOD, prompt_ids=(-1,)), "prompt_ids"),
        (replace(GOOD, prompt_ids=(1,) * 64), "prompt_ids"),
        (replace(GOOD, prompt_ids=(1,) * 61), "stopping.max_tokens"),
        (replace(GOOD, emitted_ids=(VOCAB,)), "emitted_ids"),
        (replace(GOOD, emitted_ids=(1,) * 5), "emitted_ids"),
        (replace(GOOD, sampling=SamplingParams(temperature=-0.1)), "sampling.temperature"),
        (replace(GOOD, sampling=SamplingParams(temperature=float("nan"))), "sampling.temperature"),
        (replace(GOOD, sampling=SamplingParams(top_k=-1)), "sampling.top_k"),
        (replace(GOOD, sampling=SamplingParams(top_p=0)), "sampling.top_p"),
        (replace(GOOD, sampling=SamplingParams(top_p=float("nan"))), "sampling.top_p"),
        (replace(GOOD, sampling=SamplingParams(seed=1 << 64)), "sampling.seed"),
        (replace(GOOD, sampling=SamplingParams(temperature=float("inf"))), "sampling.temperature"),
        (replace(GOOD, sampling=SamplingParams(min_p=-0.1)), "sampling.min_p"),
        (replace(GOOD, sampling=SamplingParams(min_p=1.1)), "sampling.min_p"),
        (replace(GOOD, sampling=SamplingParams(typical_p=0)), "sampling.typical_p"),
        (replace(GOOD, sampling=SamplingParams(typical_p=float("nan"))), "sampling.typical_p"),
        (replace(GOOD, sampling=SamplingParams(repetition_penalty=0)), "sampling.repetition_penalty"),
        (replace(GOOD, sampling=SamplingParams(repetition_penalty=float("inf"))), "sampling.repetition_penalty"),
        (replace(GOOD, sampling=SamplingParams(frequency_penalty=2.1)), "sampling.frequency_penalty"),
        (replace(GOOD, sampling=SamplingParams(presence_penalty=-2.1)), "sampling.presence_penalty"),
        (replace(GOOD, sampling=SamplingParams(logit_bias=((VOCAB, 1.0),))), "sampling.logit_bias"),
        (replace(GOOD, sampling=SamplingParams(logit_bias=((-1, 1.0),))), "sampling.logit_bias"),
        (replace(GOOD, sampling=SamplingParams(allowed_token_ids=(1, VOCAB))), "sampling.allowed_token_ids"),
        (replace(GOOD, sampling=SamplingParams(allowed_token_ids=(1,) * 4097)), "sampling.allowed_token_ids"),
        (replace(GOOD, sampling=SamplingParams(bad_word_ids=((1, VOCAB),))), "sampling.bad_words"),
        (replace(GOOD, sampling=SamplingParams(bad_word_ids=((),))), "sampling.bad_words"),
        (replace(GOOD, sampling=SamplingParams(bad_word_ids=((1,) * 513,))), "sampling.bad_words"),
        (replace(GOOD, sampling=SamplingParams(bad_word_ids=((1,),) * 129)), "sampling.bad_words"),
        (replace(GOOD, sampling=SamplingParams(bad_word_ids=((1,),) * (VOCAB // 2))), "sampling.bad_words"),
        (replace(GOOD, sampling=SamplingParams(logit_bias=((1, 100.5),))), "sampling.logit_bias"),
        (replace(GOOD, sampling=SamplingParams(logit_bias=((1, float("nan")),))), "sampling.logit_bias"),
        (replace(GOOD, sampling=SamplingParams(logit_bias=((1, 1.0),) * 301)), "sampling.logit_bias"),
        (replace(GOOD, logprobs=21), "logprobs"),
        (replace(GOOD, logprobs=-1), "logprobs"),
        (replace(GOOD, prompt_logprobs=21), "prompt_logprobs"),
        (replace(GOOD, stopping=StoppingParams(max_tokens=-1)), "stopping.max_tokens"),
        (replace(GOOD, stopping=StoppingParams(max_tokens=2, min_tokens=3)), "stopping.min_tokens"),
        (replace(GOOD, stopping=StoppingParams(max_tokens=2, stop_token_ids=(VOCAB,))), "stopping.stop_token_ids"),
        (replace(GOOD, stopping=StoppingParams(max_tokens=2, stop_token_ids=(1,) * 65)), "stopping.stop_token_ids"),
        (replace(GOOD, stopping=StoppingParams(max_tokens=2, end_ids=(VOCAB,))), "stopping.end_ids"),
        (replace(GOOD, choice=-1), "choice"),
        (replace(GOOD, priority=101), "priority"),
        (replace(GOOD, adapter=AdapterSource("", "/adapters")), "adapter.digest"),
    ],
)
def test_refusals_name_the_field(bad: NewSequence, field: str) -> None:
    with pytest.raises(SequenceRefusedError) as refused:
        check_sequence(bad, LIMITS)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "good",
    [
        replace(GOOD, prompt_ids=(1,) * 60),
        replace(GOOD, emitted_ids=(1,) * 4),
        replace(GOOD, sampling=SamplingParams(temperature=2, top_k=1 << 20, top_p=1, seed=(1 << 64) - 1)),
        replace(GOOD, sampling=SamplingParams(min_p=1, typical_p=1e-9, repetition_penalty=1e-9, frequency_penalty=-2)),
        replace(GOOD, sampling=SamplingParams(presence_penalty=2, logit_bias=((0, -100.0), (VOCAB - 1, 100.0)))),
        replace(GOOD, logprobs=0, prompt_logprobs=20),
        replace(GOOD, stopping=StoppingParams(max_tokens=62, min_tokens=62, stop_token_ids=(0, VOCAB - 1))),
        replace(GOOD, priority=-100, choice=15),
    ],
)
def test_the_limits_themselves_are_taken(good: NewSequence) -> None:
    check_sequence(good, LIMITS)


def test_too_few_blocks_refuse_what_could_never_run() -> None:
    with pytest.raises(ValueError, match="4 blocks of 4 do not hold max_tokens, 64"):
        replace(LIMITS, blocks=4)
    limits = replace(LIMITS, blocks=4, max_tokens=16)
    made = NewSequence("s", (1,) * 7, stopping=StoppingParams(max_tokens=9))
    check_sequence(made, limits)
    larger = replace(made, stopping=StoppingParams(max_tokens=10))
    with pytest.raises(SequenceRefusedError, match=r"^stopping.max_tokens: 10 and a prompt of 7 .* the 16 "):
        check_sequence(larger, limits)


def test_no_adapter_without_slots() -> None:
    adapted = replace(GOOD, adapter=AdapterSource("sha256:a", "/adapters/a"))
    check_sequence(adapted, LIMITS)
    with pytest.raises(SequenceRefusedError, match=r"^adapter: this engine has no adapter slots"):
        check_sequence(adapted, replace(LIMITS, adapter_slots=0))
