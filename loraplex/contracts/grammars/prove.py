"""Proves grammars, and finds the part of a schema at fault: the child process of prover.py, which one may kill.

    python -m grammars.prove MEMORY_BYTES CPU_S

Reads a JSON line {"grammar", "size", "special"} and answers {} or {"path", "error"}, until its input ends.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.build import HEADER, format_alone
from loraplex.contracts.grammars.json_schema import direct_parts
from loraplex.contracts.grammars.matching import compile_grammar, plain_error, proof_vocabulary

# Number of steps of niceness by which proofs stand back for the router and the workers of a busy machine.
_NICE = 5
# Number of tokens of the answer that is made to see that masks can be computed.
_STEPS = 32
# A part of a schema, with its path.
Part = tuple[str, dict[str, Any]]
_SCHEMA = re.compile(r"(?:^(?:(?P<start>start)|arguments_(?P<tool>\d+)\w*): )?%json (?=\{)", re.MULTILINE)
# Parts of a schema that any of its parts may need.
_SHARED = ("$defs", "definitions", "x-guidance")


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
    # An answer that begins with reasoning, or with a call, proves little of its format.
    for each in dict.fromkeys((format_alone(grammar), grammar)):
        try:
            _begin_answer(compile_grammar(vocabulary, each))
        except GrammarError as error:
            path, message = find_place(partial(_error_of, vocabulary), each, error.message)
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


def find_place(error_of: Callable[[str], str], grammar: str, message: str) -> tuple[str, str]:
    """Return the path and the error of the smallest part at fault; an empty path where no schema of a grammar is.

    `message` is the grammar's error; `error_of` returns that of a Lark text without header, empty for none.
    """
    for path, schema in _schemas(grammar):
        error, place = _Search(error_of, schema, message).smallest((path, schema))
        if error:
            return place, error
    return "", message


def _schemas(grammar: str) -> Iterator[Part]:
    """Yield the schemas of a grammar, each with its path behind the field that the grammar was made of."""
    of_tools = "\nfunction: function_" in grammar
    for number, match in enumerate(_SCHEMA.finditer(grammar)):
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, match.end())
        except ValueError:  # a text of the grammar that looks like one
            continue
        if of_tools and match["tool"]:
            yield f"[{match['tool']}].parameters", schema
        else:
            whole = match["start"] and end == len(grammar) - 1
            yield "" if whole else f".json[{number}]", schema


class _Search:
    """A search in one schema, which halves the parts of a part: a schema of hundreds of parts takes a dozen proofs."""

    def __init__(self, error_of: Callable[[str], str], schema: dict[str, Any], message: str) -> None:
        self._error_of = error_of
        self._shared = {name: schema[name] for name in _SHARED if name in schema}
        # An optional part that cannot be met is no fault of its schema, unless a required one is the fault.
        self._unsatisfiable = "Unsatisfiable" in message

    def smallest(self, part: Part) -> tuple[str, str]:
        """Return the error and the path of the smallest part at fault in a part; an empty error: there is none."""
        if not (error := self._error(part[1])):
            return "", ""
        while inner := [(part[0] + at, one) for at, one in direct_parts(part[1]) if _stands_alone(one)]:
            if not self._any_fails(inner):
                break
            while len(inner) > 1:
                half = inner[: len(inner) // 2]
                inner = half if self._any_fails(half) else inner[len(half) :]
            if not (alone := self._error(inner[0][1])):
                break
            part, error = inner[0], alone
        return error, part[0]

    def _any_fails(self, parts: Sequence[Part]) -> bool:
        items = [part for _, part in parts]
        required = {"minItems": len(items)} if self._unsatisfiable else {}
        return bool(self._error({"type": "array", "prefixItems": items, **required}))

    def _error(self, schema: dict[str, Any]) -> str:
        error = self._error_of(f"start: %json {json.dumps({**self._shared, **schema})}\n")
        return "" if "Unsatisfiable" in error and not self._unsatisfiable else error


def _stands_alone(part: Any) -> bool:
    """Tell whether a part of a schema needs nothing but what all parts share."""
    if not isinstance(part, dict):
        return False
    references = re.findall(r'"\$ref": "([^"]*)"', json.dumps(part))
    return all(reference.startswith(("#/$defs/", "#/definitions/")) for reference in references)


if __name__ == "__main__":
    main()
