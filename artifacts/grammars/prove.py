"""Proves grammars one after the other: the child process of prover.py, which a bad grammar may kill.

    python -m artifacts.grammars.prove MEMORY_BYTES CPU_S

Reads a JSON line {"grammar", "size", "special"} and answers {} or {"path", "error"}, until its input ends.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from functools import partial

from llguidance import LLMatcher, LLTokenizer

from artifacts.grammars.build import HEADER
from artifacts.grammars.errors import GrammarError
from artifacts.grammars.matching import compile_grammar, plain_error, proof_vocabulary
from artifacts.grammars.places import find_place

# Number of steps of niceness by which proofs stand back for the router and the workers of a busy machine.
_NICE = 5
# Number of tokens of the answer that is made to see that masks can be computed.
_STEPS = 32


def main() -> None:
    """Answer until the input ends. Time is the processor's, so that a busy machine refuses no grammar."""
    memory_bytes, cpu_s = int(sys.argv[1]), float(sys.argv[2])
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group of processes
    vocabulary: LLTokenizer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if vocabulary is None:  # every request names the same
            special = {int(token_id): text for token_id, text in request["special"].items()}
            vocabulary = proof_vocabulary(request["size"], special)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = prove(vocabulary, request["grammar"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def prove(vocabulary: LLTokenizer, grammar: str) -> dict[str, str]:
    """Compile a grammar and make the beginning of an answer; return an error, and where it is in a schema."""
    try:
        _begin_answer(compile_grammar(vocabulary, grammar))
    except GrammarError as error:
        path, message = find_place(partial(_error_of, vocabulary), grammar, error.message)
        return {"path": path, "error": message}
    return {}


def _error_of(vocabulary: LLTokenizer, rules: str) -> str:
    try:
        compile_grammar(vocabulary, HEADER + rules)
    except GrammarError as error:
        return error.message
    return ""


def _begin_answer(matcher: LLMatcher) -> None:
    for step in range(_STEPS):
        # The mask is read as one integer, bit i for id i: importing numpy would double the start-up time.
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_stopped():
            if not matcher.is_accepting():
                error = matcher.get_error()
                dead = not error or "NoExtension" in error
                raise GrammarError("", "accepts nothing" if dead else plain_error(error))
            return
        others = allowed & (allowed - 1)
        allowed = others if others and step % 2 else allowed
        matcher.consume_token((allowed & -allowed).bit_length() - 1)


if __name__ == "__main__":
    main()
