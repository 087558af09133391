"""Sampling a step: while it is launched nothing may need the device's results, or stepping ahead gains nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.worker.engine.sampling import sampler
from loraplex.worker.engine.sampling import step as sampling_step
from loraplex.worker.engine.sampling.sampler import NO_MASKS, Masks, best_with_torch, forbid_with_torch
from loraplex.worker.engine.sampling.step import InFlight, launch_sampling
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import Failure, NewSequence

VOCAB = 3000
PROMPT = (1, 2, 3, 2)
LIMITED = [
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.0, typical_p=0.5),
]
ALL = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(repetition_penalty=1.2, logit_bias=((7, 1.0),)),
    SamplingParams(temperature=1.0, frequency_penalty=0.5),
    SamplingParams(),
]


def batch(samplings: list[SamplingParams], **fields: Any) -> Batch:
    """Rows that have just computed their whole prompts; the last one is in the midst of its own."""
    rows = []
    for number, sampling in enumerate(samplings):
        spec = NewSequence(str(number), PROMPT, sampling=sampling, stopping=StoppingParams(9, 2, (5,)), **fields)
        rows.append(Row(Sequence(spec, number, frozenset([6])), 0, len(PROMPT), True))
    rows[-1] = Row(rows[-1].sequence, 0, len(PROMPT) - 1, False)
    return Batch(tuple(rows), 0, sum(row.count for row in rows))


@pytest.fixture(autouse=True)
def torch_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where steps overlap: the CPU's kernel reads the logits."""
    monkeypatch.setattr(sampler, "best_of_rows", best_with_torch)


def launch(step: Batch, masks: Masks = NO_MASKS) -> InFlight:
    wanted = sum(len(row.prompt_positions) + row.samples for row in step.rows)
    logits = torch.randn(wanted, VOCAB, generator=torch.Generator().manual_seed(1))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        return launch_sampling(fake.from_tensor(logits), step, masks)


def test_launching_needs_no_result(one_thread: None) -> None:
    """On tensors without numbers, where every look at one raises. Limits are a kernel's on CUDA: test_cuda_steps.py."""
    in_flight = launch(batch(ALL, logprobs=3, prompt_logprobs=2))
    assert in_flight.failures == {}
    assert len(in_flight.rows) == len(ALL) - 1
    assert len(in_flight.prompts) == len(ALL)
    assert len(in_flight.logprobs) == 1


def test_masks_need_no_result(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do rows that failed when their masks were filled. On CUDA, where steps overlap, torch applies them."""
    monkeypatch.setattr(sampling_step, "forbid_ids", forbid_with_torch)
    step = batch(ALL)
    mask = np.full(VOCAB // 32 + 1, 1 << 7, dtype=np.int32)
    failure = Failure("INVALID_ARGUMENT", "GRAMMAR_FAILED", "nothing may come", "format")
    masks = Masks(dict.fromkeys(step.rows[1:-1], mask), {step.rows[0]: failure})
    assert launch(step, masks).failures == {step.rows[0]: failure}


@pytest.mark.parametrize("sampling", LIMITED)
def test_a_first_look_needs_one(one_thread: None, sampling: SamplingParams) -> None:
    """So that the test above is not vacuous."""
    assert launch(batch([sampling, SamplingParams()])).failures
