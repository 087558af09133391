"""The time from a new schema to a grammar that is ready, in the steps that router and engine take."""

from __future__ import annotations

import time
from contextlib import closing

from bench.structured_schemas import schema_text
from bench.tokenizer import END_ID
from loraplex.contracts.grammars.build import json_grammar
from loraplex.contracts.grammars.matching import compile_grammar, read_vocabulary, special_tokens
from loraplex.contracts.grammars.prover import Prover

# Number of schemas that are compiled before any is timed.
_WARM = 4


def compile_seconds(tokenizer: bytes, size: int, schemas: int) -> list[float]:
    """Return the seconds of each new schema's check and proof (as in a router), proof and compilation (engine)."""
    vocabulary = read_vocabulary(tokenizer, size, [END_ID])
    special = special_tokens(tokenizer)
    seconds = []
    with closing(Prover(size, special)) as of_router, closing(Prover(size, special)) as of_engine:
        for number in range(_WARM + schemas):
            schema = schema_text(number, f"compiled_{number}")
            start = time.perf_counter()
            grammar = json_grammar(schema)
            of_router.prove(grammar)
            of_engine.prove(grammar)
            compile_grammar(vocabulary.tokens, grammar)
            seconds.append(time.perf_counter() - start)
    return seconds[_WARM:]
