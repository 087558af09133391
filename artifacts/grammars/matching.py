"""Compiles grammars with llguidance, under limits of what one may cost: the same in a proof and in an engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from artifacts.grammars.errors import GrammarError

# llguidance is imported by the first grammar: with numpy, half of the start of an engine without a model.
if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_REGEX_ERROR = re.compile(r"^ *error: (.*)$", re.MULTILINE)
# Errors of llguidance that name its own options and expressions, and what they mean to a caller.
_MEANINGS = (
    (
        "oneOf constraints are not supported",
        "oneOf: its schemas are not seen to exclude each other; give each a type or a property with a const of its own,"
        " or use anyOf",
    ),
    (
        "Unsatisfiable schema: Regex is empty",
        "Unsatisfiable schema: no text has its pattern, format and length at once",
    ),
    (
        "Parser Error: Current row has",
        "allows too much at one place, such as 500 optional properties; require some of them, or allow fewer",
    ),
    ("lookarounds not supported", r"\b and \B, and ^ and $ in the middle, are not supported"),
)
_PLACE = re.compile(r"^(?:at )?(?:\d+\(\d+\): )?(?:failed to compile JSON schema: )?")


@cache
def _limits() -> LLParserLimits:
    """Return llguidance's limits for one grammar, far below its defaults.

    A mask that reaches them takes some 10 ms, and the states of a grammar some 40 MB. Schemas of real services stay
    below a tenth of them.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def compile_grammar(vocabulary: LLTokenizer, grammar: str, path: str = "format") -> LLMatcher:
    """Compile a grammar; its matcher is at the beginning of an answer. Raises GrammarError."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_limits())
    if matcher.is_error():
        raise GrammarError(path, plain_error(matcher.get_error()))
    return matcher


def plain_error(error: str) -> str:
    """Return what an error of llguidance says, without the grammar that it repeats."""
    for begins, meaning in _MEANINGS:
        if begins in error:
            return meaning
    found = _REGEX_ERROR.search(error)
    return found[1] if found else _PLACE.sub("", error.strip().partition("\n")[0])


class TokenTexts:
    """The bytes of each token as llguidance asks for them; its attributes' names are llguidance's."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int, special_token_ids: Sequence[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.special_token_ids = special_token_ids
        self._single = {token[0]: token_id for token_id, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize byte by byte. Grammars are compiled with no_forcing, so that no answer depends on it."""
        data = text.encode() if isinstance(text, str) else text
        return [self._single[byte] for byte in data if byte in self._single]


def proof_vocabulary(size: int, special: Mapping[int, str]) -> LLTokenizer:
    """Return a vocabulary of `size` ids and an end token: the special tokens, single bytes, and others without text."""
    from llguidance import LLTokenizer

    tokens = [b""] * (max(size, 256 + len(special)) + 1)
    for token_id, text in special.items():
        tokens[token_id] = text.encode()
    free = (token_id for token_id in range(len(tokens) - 1) if token_id not in special)
    for byte, token_id in zip(range(256), free, strict=False):
        tokens[token_id] = bytes([byte])
    end = len(tokens) - 1
    tokens[end] = b"<end>"  # a special token without text would be taken for the beginning of any other
    return LLTokenizer(TokenTexts(tokens, end, [*special, end]))  # type: ignore[arg-type]
