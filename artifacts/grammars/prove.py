"""Proves grammars one after the other: the child process of prover.py, which a bad grammar may kill.

    python -m artifacts.grammars.prove MEMORY_BYTES CPU_S

Reads a JSON line {"grammar", "size", "special"} and answers {} or {"path", "error"}, until its input ends.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from artifacts.grammars.endings import direct_parts
from artifacts.grammars.errors import GrammarError
from artifacts.grammars.matching import compile_grammar, plain_error, proof_vocabulary

# Number of tokens of the answer that is made to see that masks can be computed.
_STEPS = 32
_JSON = re.compile(r"\A(?P<head>.*\n)start: %json (?P<schema>\{.*\})\n\Z", re.DOTALL)


def main() -> None:
    """Answer until the input ends. Time is the processor's, so that a busy machine refuses no grammar."""
    memory_bytes, cpu_s = int(sys.argv[1]), float(sys.argv[2])
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
        path, message = _place(vocabulary, grammar, error.message)
        return {"path": path, "error": message}
    return {}


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


def _place(vocabulary: LLTokenizer, grammar: str, message: str) -> tuple[str, str]:
    """Return the path of the smallest part of a schema that fails alone, and its error."""
    found = _JSON.match(grammar)
    if not found:
        return "", message
    root = json.loads(found["schema"])
    shared = {name: root[name] for name in ("$defs", "definitions", "x-guidance") if name in root}
    for path, part in _parts_first(root, ""):
        try:
            compile_grammar(vocabulary, f"{found['head']}start: %json {json.dumps({**shared, **part})}\n")
        except GrammarError as error:
            if path and "Unsatisfiable" in error.message and "Unsatisfiable" not in message:
                continue
            return path, error.message
    return "", message


def _parts_first(part: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas in a schema that need no other part of it, the innermost first, with their paths."""
    if not isinstance(part, dict):
        return
    for at, inner in direct_parts(part):
        yield from _parts_first(inner, path + at)
    references = re.findall(r'"\$ref": "([^"]*)"', json.dumps(part))
    if all(reference.startswith(("#/$defs/", "#/definitions/")) for reference in references):
        yield path, part


if __name__ == "__main__":
    main()
