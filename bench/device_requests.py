"""Requests of every kind, drawn: what they sample by, report and end with; with adapters and without.

They show on a fake device that no step waits and no kernel is compiled once an engine serves (bench/fake_cuda.py), and
on a real one the same (bench/device_checks.py).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from loraplex.contracts.options import Encode, SamplingParams, StoppingParams
from loraplex.worker.engine.torch_engine import TorchEngine
from loraplex.worker.engine_api import AdapterSource, NewSequence

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
_LENGTHS = (1, 2, 5, 9, 17, 30)


def draw_requests(
    count: int,
    chance: random.Random,
    adapters: Mapping[str, str],
    grammars: Sequence[str] = (),
    *,
    longest: int = 30,
    vocabulary: int = 320,
) -> list[NewSequence]:
    """Draw requests of ids from 3 on; `adapters` are directories by name. One prompt in eight has `longest` tokens."""
    drawn = []
    for number in range(count):
        length = longest if number % 8 == 5 else chance.choice(_LENGTHS)
        prompt = tuple(chance.choices(range(3, vocabulary), k=length))
        adapter = chance.choice([None, *adapters])
        asked: dict[str, Any] = {"adapter": AdapterSource(adapter, adapters[adapter]) if adapter else None}
        if number % 7 == 6:
            asked |= {"encode": Encode("embed", chance.choice(["mean", "last"])), "stopping": StoppingParams(0)}
        else:
            asked |= {
                "sampling": [*SAMPLINGS.values()][number % len(SAMPLINGS)],
                "stopping": StoppingParams(chance.randrange(1, 9), min_tokens=chance.choice([0, 1])),
                "logprobs": chance.choice([None, 0, 3]),
                "prompt_logprobs": chance.choice([None, None, 2]),
                "grammar": chance.choice(grammars) if grammars and chance.random() < 0.2 else "",
            }
        drawn.append(NewSequence(f"{number}", prompt, **asked))
    return drawn


def run_requests(engine: TorchEngine, sequences: Sequence[NewSequence], chance: random.Random) -> int:
    """Let sequences arrive one by one while others run; return the steps' number. Raises RuntimeError if one fails."""
    waiting, ended, steps = list(sequences), set[str](), 0
    while len(ended) < len(sequences):
        if waiting and chance.random() < 0.4:
            engine.add_sequence(waiting.pop(0))
        for output in engine.step():
            if output.failure is not None:
                raise RuntimeError(f"{output.sequence_id} failed: {output.failure.message}")
            if output.finish:
                ended.add(output.sequence_id)
        steps += 1
    return steps
