"""Compiles grammars with llguidance over a vocabulary, under limits: the same in a proof and in an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from loraplex.contracts.artifacts.hash_model import HashModel
from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.build import CLIENT_RULES

# llguidance is imported by the first grammar: with numpy, half of the start of an engine without a model.
if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Maximum number of items of a parser's row: unfinished rules, each with the place where it began. The work for a token
# grows with their square or cube where rules read an answer in many ways, as `s: s s | "a"` does: with so many of a
# client's some 20 ms. JSON schemas do not, and have up to four for each optional property.
_ITEMS, _CLIENT_ITEMS = 2_000, 256
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
        f"; max is {_CLIENT_ITEMS};",
        f"has more than {_CLIENT_ITEMS} unfinished rules at one place; repeat with + or *, and let no rule begin and"
        ' end with itself, as e: e "+" e does',
    ),
    (
        "Parser Error: Current row has",
        "allows too much at one place, such as 500 optional properties; require some of them, or allow fewer",
    ),
    ("Too many items (limit", "has too many unfinished rules for a token; read letters by terminals, as /[a-z]+/"),
    ("lookarounds not supported", r"\b and \B, and ^ and $ in the middle, are not supported"),
)
_PLACE = re.compile(r"^(?:at )?(?:\d+\(\d+\): )?(?:failed to compile JSON schema: )?")


@cache
def _limits(*, of_client: bool) -> LLParserLimits:
    """Return llguidance's limits for one grammar, far below its defaults; lower for rules of a client.

    A mask that reaches them takes some 10 to 30 ms, and the states of a grammar some 40 MB. Schemas of real services
    stay below a tenth of them, a grammar of C below half.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=_CLIENT_ITEMS if of_client else _ITEMS,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=10_000 if of_client else 20_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def compile_grammar(vocabulary: LLTokenizer, grammar: str, path: str = "format") -> LLMatcher:
    """Compile a grammar; its matcher is at the beginning of an answer. Raises GrammarError."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_limits(of_client=CLIENT_RULES in grammar))
    if matcher.is_error():
        raise GrammarError(path, plain_error(matcher.get_error()))
    return matcher


def plain_error(error: str) -> str:
    """Return what an error of llguidance says, without the grammar that it repeats."""
    for begins, meaning in _MEANINGS:
        if begins in error:
            return meaning
    match = _REGEX_ERROR.search(error)
    return match[1] if match else _PLACE.sub("", error.strip().partition("\n")[0])


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


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens for llguidance. Masks have `words` numbers of 32 bits; ids from `size` on are no tokens."""

    tokens: LLTokenizer
    size: int
    end_ids: frozenset[int]

    @property
    def words(self) -> int:
        """Return the width of a mask."""
        return int(self.tokens.vocab_size + 31) // 32


# Number of the hash model's tokens that write formats: with all of 32,000 an engine took 0.2 s to start on one.
_HASH_TEXTS = 1_024


@lru_cache(maxsize=4)
def hash_vocabulary(model: HashModel) -> Vocabulary:
    """Return the tokens of the hash model, the first ones with the text that a router shows for them."""
    from llguidance import LLTokenizer

    end_ids = model.end_token_ids
    # An end token is added after the model's last id, where masks never allow it: llguidance needs one.
    tokens = [hash_token_text(token_id).encode() for token_id in range(min(model.vocab, _HASH_TEXTS))]
    tokens += [b""] * (model.vocab + 1 - len(tokens))
    ends = [*end_ids, model.vocab]
    for token_id in ends:
        tokens[token_id] = b"<end>"
    texts = TokenTexts(tokens, ends[0], ends)
    return Vocabulary(LLTokenizer(texts, eos_token=ends), model.vocab, frozenset(end_ids))  # type: ignore[arg-type]


def hash_token_text(token_id: int) -> str:
    """Return the text of a token of the hash model: the character of a byte, so that none waits for another."""
    return chr(token_id) if token_id < 256 else f"<{token_id}>"


def read_vocabulary(tokenizer_json: bytes, size: int, end_ids: Collection[int]) -> Vocabulary:
    """Return the tokens of a model whose logits have `size` ids. Raises GrammarError."""
    from llguidance import LLTokenizer

    ends = sorted(token_id for token_id in end_ids if token_id < size)
    try:
        tokens = LLTokenizer(tokenizer_json.decode(), n_vocab=size, eos_token=ends or None)
        if not ends:
            tokens = _with_end(tokens, size)
    except Exception as error:  # the library raises bare exceptions
        raise GrammarError("format", f"the model's tokenizer cannot be used with formats: {error}") from error
    return Vocabulary(tokens, size, frozenset(ends))


def _with_end(tokens: LLTokenizer, size: int) -> LLTokenizer:
    """Add an end token: llguidance needs one, and the model has none."""
    from llguidance import LLTokenizer

    texts = [tokens.decode_bytes([token_id]) for token_id in range(size)] + [b"<end>"]
    special = [token_id for token_id in range(size) if tokens.is_special_token(token_id)]
    return LLTokenizer(TokenTexts(texts, size, [*special, size]))  # type: ignore[arg-type]


def special_tokens(tokenizer_json: bytes) -> Mapping[int, str]:
    """Return the texts of a tokenizer's special tokens by their ids; llguidance takes any added `<...>` for one."""
    added = json.loads(tokenizer_json).get("added_tokens") or []
    return {
        token["id"]: text
        for token in added
        if (text := token["content"]) and (token.get("special") or (text[0] == "<" and text[-1] == ">"))
    }
