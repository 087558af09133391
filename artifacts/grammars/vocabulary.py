"""Vocabularies as grammars see them: the bytes of each token, special tokens apart from text."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from artifacts.grammars.errors import GrammarError
from artifacts.grammars.matching import TokenTexts
from artifacts.hash_model import HashModel

# See artifacts.grammars.matching.
if TYPE_CHECKING:
    from llguidance import LLTokenizer


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
    """Return the texts of a tokenizer's special tokens by their ids."""
    added = json.loads(tokenizer_json).get("added_tokens") or []
    return {token["id"]: token["content"] for token in added if token.get("special")}
