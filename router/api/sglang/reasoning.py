"""Counting the tokens of an answer's reasoning, for requests that ask for it."""

from __future__ import annotations

from collections.abc import Sequence

from router.text.chat import REASONING
from router.text.text import Text
from rpc.errors import InvalidField, NotBuilt


def reasoning_end(text: Text) -> int:
    """Return the token that ends a model's reasoning. Raises NotBuilt for a model that has none."""
    for _, mark in REASONING:
        try:
            ids = text.encode(mark, special_tokens=False)
        except InvalidField:  # a model without a tokenizer
            break
        if len(ids) == 1:
            return ids[0]
    raise NotBuilt("require_reasoning")


class ReasoningCount:
    """The number of an answer's tokens before the one that ends its reasoning; 0 where `end` is None."""

    def __init__(self, end: int | None) -> None:
        self._end = end
        self.tokens = 0

    def add(self, ids: Sequence[int]) -> None:
        """Take the answer's next tokens."""
        if self._end is None:
            return
        reasoning = ids[: ids.index(self._end)] if self._end in ids else ids
        self.tokens += len(reasoning)
        if len(reasoning) < len(ids):
            self._end = None
