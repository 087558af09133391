"""Runs the JSON-Schema test suite through the grammars of answers, without a model: what is enforced, refused, wrong.

    make json-schema-suite                                             get the suite, write docs/results/json-schema.md
    python -m bench.json_schema_suite DIR [--write docs/results/json-schema.md]

A case is an instance that a schema allows or forbids. A schema is refused, with all its cases, where the router refuses
it. Of the others a forbidden instance must be no text of the grammar, and an allowed one must be a text: as json.dumps
writes it, with its properties in some order, and 1.0 written as 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.build import json_grammar
from loraplex.contracts.grammars.matching import compile_grammar, proof_vocabulary
from loraplex.contracts.grammars.prove import prove

DRAFT = Path("tests") / "draft2020-12"
# Maximum number of orders of an instance's properties that are tried.
ORDERS = 720
# Cases of llguidance's own baseline that its schemas decide as the suite says.
BASELINE = 934

_PAGE = """# JSON schemas: what is enforced

How a [`json_schema`](../guides/structured-answers.md) treats the cases of the official [JSON-Schema test
suite](https://github.com/json-schema-org/JSON-Schema-Test-Suite), draft 2020-12 with its optional files. A case is a
value that a schema allows or forbids. `make json-schema-suite` writes this page; `python -m bench.json_schema_suite DIR
--reasons` lists what is refused and left out, by file.

- **Enforced**: an answer can be the value exactly where the schema allows it.
- **Refused**: the request ends with INVALID_ARGUMENT, which names the keyword by its path.
- **Left out**: the schema allows the value, and no answer can be it.
- **Wrong**: the schema forbids the value, and an answer can be it.

Left out are rare spellings of a format (quoted e-mail names, leap seconds with an offset, punycode), numbers near the
end of float64, and texts that the suite calls valid because a validator may ignore formats: here formats count.

"""


@dataclass
class Tally:
    """The cases of a file: `left_out` and `wrong` say which, `reasons` why schemas were refused."""

    enforced: int = 0
    refused: int = 0
    left_out: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


class Texts:
    """Tells whether a grammar has a text, byte by byte."""

    def __init__(self) -> None:
        self._vocabulary: LLTokenizer = proof_vocabulary(256, {})

    def compile(self, schema: Any) -> LLMatcher:
        """Compile a schema as router and worker do. Raises GrammarError."""
        grammar = json_grammar(json.dumps(schema))
        if error := prove(self._vocabulary, grammar):
            raise GrammarError(error["path"], error["error"])
        return compile_grammar(self._vocabulary, grammar)

    @staticmethod
    def has(matcher: LLMatcher, text: str) -> bool:
        """Return whether a text is one of a compiled grammar."""
        matcher.reset()
        data = list(text.encode())
        return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def check_suite(directory: Path) -> dict[str, Tally]:
    """Check every file of the draft; return the tallies by the files' names."""
    texts, root = Texts(), directory / DRAFT
    tallies: dict[str, Tally] = {}
    for file in sorted(root.rglob("*.json")):
        name = str(file.relative_to(root).with_suffix(""))
        tally = tallies[name] = Tally()
        for group in json.loads(file.read_text()):
            _check_group(texts, group, tally)
    if not tallies:
        raise SystemExit(f"error: {directory}: holds no {DRAFT}; give a checkout of the test suite")
    return tallies


def _check_group(texts: Texts, group: Mapping[str, Any], tally: Tally) -> None:
    try:
        matcher = texts.compile(group["schema"])
    except GrammarError as error:
        tally.refused += len(group["tests"])
        tally.reasons[f"{error.path.rpartition('.')[2]}: {error.message}"] += 1
        return
    for case in group["tests"]:
        accepted = any(texts.has(matcher, text) for text in spellings(case["data"]))
        if accepted == case["valid"]:
            tally.enforced += 1
        else:
            (tally.wrong if accepted else tally.left_out).append(f"{group['description']}: {case['description']}")


def spellings(value: Any) -> Iterator[str]:
    """Yield the texts of a value, with its properties in each order, as far as there are not too many."""
    for ordered in islice(_orders(value), ORDERS):
        yield json.dumps(ordered, ensure_ascii=False)


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        yield from map(list, product(*map(list, map(_few, value))))
    elif isinstance(value, dict):
        for names in permutations(value):
            yield from (
                dict(zip(names, chosen, strict=True)) for chosen in product(*(list(_few(value[n])) for n in names))
            )
    else:
        yield int(value) if isinstance(value, float) and value.is_integer() else value


def _few(value: Any) -> Iterator[Any]:
    return islice(_orders(value), 24)


def page(tallies: Mapping[str, Tally]) -> str:
    """Return the page of docs/."""
    return f"{_PAGE}{_total(tallies)}\n"


def _total(tallies: Mapping[str, Tally]) -> str:
    enforced = sum(tally.enforced for tally in tallies.values())
    refused = sum(tally.refused for tally in tallies.values())
    left_out = sum(len(tally.left_out) for tally in tallies.values())
    wrong = sum(len(tally.wrong) for tally in tallies.values())
    total = enforced + refused + left_out + wrong
    return f"Of {total} cases **{enforced} are enforced, {refused} refused, {left_out} left out, {wrong} wrong**."


def main() -> None:
    """Print the table; exit with 1 where a case is wrong, or fewer are enforced than llguidance's own."""
    parser = argparse.ArgumentParser(prog="python -m bench.json_schema_suite", description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path, help="a checkout of the test suite")
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--reasons", action="store_true", help="say why schemas are refused, and what is left out")
    arguments = parser.parse_args()
    tallies = check_suite(arguments.directory)
    for name, tally in tallies.items():
        for line in tally.wrong:
            print(f"wrong: {name}: {line}")
        if arguments.reasons:
            for line in tally.left_out:
                print(f"left out: {name}: {line}")
            for reason, count in tally.reasons.most_common():
                print(f"refused: {name}: {count} x {reason}")
    print(_total(tallies))
    if arguments.write:
        arguments.write.write_text(page(tallies))
    enforced = sum(tally.enforced for tally in tallies.values())
    sys.exit(1 if any(tally.wrong for tally in tallies.values()) or enforced < BASELINE else 0)


if __name__ == "__main__":
    main()
