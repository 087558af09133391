"""Answers with formats of engine processes that are killed: all are valid, and those of an undisturbed engine.

The suite has the hash model answer some. `make formats` has a tiny model with random weights answer a thousand, over
two hundred schemas, with adapters, penalties and too few blocks.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from loraplex.contracts.grammars.build import json_grammar
from loraplex.contracts.grammars.matching import hash_token_text
from loraplex.contracts.options import FinishReason, SamplingParams, StoppingParams
from loraplex.worker.engine_api import AdapterSource, EngineConfig, NewSequence
from loraplex.worker.io.engine_client import EngineProcess
from loraplex.worker.ipc import Add, Configure, Stepped
from tests.drawn_schemas import Schema, byte_tokenizer, draw_schema
from tests.hash_oracle import expected_ids

# Number of answers of the long form; two in each three share their schema with another.
LONG = int(os.environ.get("FORMAT_ANSWERS", "0"))
MODEL = "hash:?vocab=600&seed=5"
VOCAB = 320
CONFIG = EngineConfig(MODEL, rows=8, kv_blocks=60, block_size=8, step_tokens=64, adapter_slots=2, max_rank=16)
Answers = dict[str, tuple[tuple[int, ...], FinishReason]]


def drawn(seed: int, count: int, sources: list[AdapterSource | None]) -> tuple[list[NewSequence], dict[str, Schema]]:
    """Draw `count` answers, two choices of a request each, over a fifth as many schemas or more."""
    chance = Random(seed)
    distinct: dict[str, Schema] = {}
    while len(distinct) < max(count // 5, 1):
        schema = draw_schema(chance)
        distinct[json.dumps(schema)] = schema
    schemas = list(distinct.values())
    sequences: list[NewSequence] = []
    of: dict[str, Schema] = {}
    for number in range(count):
        own = Random(f"{seed} {number // 2}")
        schema = schemas[number // 2 % len(schemas)]
        sampling = SamplingParams(
            temperature=1.0,
            seed=number // 2,
            top_p=own.choice([1.0, 0.9]),
            repetition_penalty=own.choice([1.0, 1.2]),
            frequency_penalty=own.choice([0.0, 0.4]),
        )
        prompt = tuple(own.randrange(3, 300) for _ in range(own.choice([1, 9, 30])))
        stopping = StoppingParams(220, min_tokens=own.choice([0, 0, 25]), ignore_eos=own.random() < 0.3)
        grammar = json_grammar(json.dumps(schema))
        name = f"a{number}"
        of[name] = schema
        sequences.append(
            NewSequence(
                name,
                prompt,
                adapter=own.choice(sources),
                sampling=sampling,
                stopping=stopping,
                choice=number % 2,
                grammar=grammar,
                tenant=own.choice(["one", "two"]),
            )
        )
    return sequences, of


async def answer(config: EngineConfig, sequences: list[NewSequence], kills: int, chance: Random) -> Answers:
    """Answer all in engine processes, of which `kills` are killed, each after some tokens."""
    emitted: dict[str, list[int]] = {sequence.sequence_id: [] for sequence in sequences}
    ended: Answers = {}
    left = kills
    while len(ended) < len(sequences):
        engine = await EngineProcess.start(Configure(config))
        await engine.ready()
        open_ones = [one for one in sequences if one.sequence_id not in ended]
        engine.send(Add([replace(one, emitted_ids=tuple(emitted[one.sequence_id])) for one in open_ones]))
        lifetime = chance.randint(1, 10 * len(open_ones)) if left else 1 << 60
        async for message in engine.messages():
            for output in message.outputs if isinstance(message, Stepped) else ():
                emitted[output.sequence_id] += output.token_ids
                lifetime -= len(output.token_ids)
                if output.finish is not None:
                    assert output.failure is None, output
                    ended[output.sequence_id] = tuple(emitted[output.sequence_id]), output.finish
            if lifetime <= 0 or len(ended) == len(sequences):
                break
        if lifetime <= 0:
            left -= 1
            engine.kill()
        await engine.stop()
    assert left == 0, "every kill is to strike"
    return ended


def check(texts: dict[str, str], answers: Answers, schemas: dict[str, Schema]) -> None:
    """Assert that each text is valid by its schema."""
    finishes = Counter(finish for _, finish in answers.values())
    assert set(finishes) <= {FinishReason.COMPLETE, FinishReason.END}, finishes
    for name, text in texts.items():
        jsonschema.validate(json.loads(text), schemas[name])


async def test_killed_engines_leave_no_trace_in_answers() -> None:
    sequences, schemas = drawn(1, 16, [None])
    answers = await answer(CONFIG, sequences, 1, Random(1))
    check(
        {name: "".join(map(hash_token_text, ids)) for name, (ids, _) in answers.items()},
        answers,
        schemas,
    )
    for one in sequences:
        options: dict[str, Any] = {"sampling": one.sampling, "stopping": one.stopping, "choice": one.choice}
        assert answers[one.sequence_id][0] == expected_ids(MODEL, one.prompt_ids, grammar=one.grammar, **options)


@pytest.mark.skipif(not LONG, reason="make formats runs it")
@pytest.mark.timeout(3600)
async def test_a_tiny_model_s_answers_survive_killed_engines(tiny_llama: Any) -> None:
    from tokenizers import Tokenizer

    (tiny_llama.directory / "tokenizer.json").write_text(byte_tokenizer(VOCAB))
    seed = int(os.environ.get("SEED", "1"))
    print(f"seed {seed}")
    sources = [None, *(AdapterSource(f"digest of {name}", str(path)) for name, path in tiny_llama.adapters.items())]
    sequences, schemas = drawn(seed, LONG, sources)
    config = replace(CONFIG, model=str(tiny_llama.directory), dtype="float32")
    answers = await answer(config, sequences, max(LONG // 100, 2), Random(seed))
    tokenizer = Tokenizer.from_str(byte_tokenizer(VOCAB))
    check({name: tokenizer.decode(list(ids)) for name, (ids, _) in answers.items()}, answers, schemas)
    undisturbed = await answer(replace(config, rows=16, kv_blocks=2000, adapter_slots=4), sequences, 0, Random(seed))
    assert answers == undisturbed
    distinct = len({json.dumps(schema) for schema in schemas.values()})
    print(f"{len(answers)} answers over {distinct} schemas, {sum(len(ids) for ids, _ in answers.values())} tokens")
