"""An engine's steps on a fake CUDA device never wait for it."""

from __future__ import annotations

from typing import Any

import pytest

from bench.fake_cuda import fake_engine
from options import SamplingParams, StoppingParams
from worker.engine_api import AdapterSource, EngineConfig, NewSequence

pytest.importorskip("triton", reason="Triton is for Linux")
pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

ROWS = 6
SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7, seed=1),
    "top_k": SamplingParams(temperature=1.0, top_k=5),
    "top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "top_n_sigma": SamplingParams(temperature=1.0, top_n_sigma=1.5),
    "typical_p": SamplingParams(temperature=1.0, typical_p=0.9),
    "every limit": SamplingParams(temperature=1.0, top_k=9, top_p=0.9, min_p=0.1, top_n_sigma=2.0, typical_p=0.9),
    "penalties": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.5),
    "bias": SamplingParams(logit_bias=((5, 2.0), (7, -2.0))),
    "allowed": SamplingParams(allowed_token_ids=(5, 6, 7)),
    "bad words": SamplingParams(bad_word_ids=((9,), (5, 6))),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_step_never_waits_for_the_device(name: str, tiny_llama: Any) -> None:
    """It launches a step before the one before it is done, whatever its rows ask for."""
    config = EngineConfig(str(tiny_llama.directory), "cuda", rows=ROWS, block_size=4, kv_blocks=60, step_tokens=16)
    with fake_engine(config) as (engine, _):
        for number, prompt_logprobs in enumerate((None, 2)):
            stopping = StoppingParams(4, min_tokens=2)
            engine.add_sequence(
                NewSequence(
                    f"{number}", tuple(range(3, 40)), sampling=SAMPLINGS[name], stopping=stopping, logprobs=2,
                    prompt_logprobs=prompt_logprobs, adapter=AdapterSource("a", "/"),
                )
            )  # fmt: skip
        ended = 0
        while ended < 2:
            outputs = engine.step()
            assert not [output.failure for output in outputs if output.failure]
            ended += sum(output.finish is not None for output in outputs)
