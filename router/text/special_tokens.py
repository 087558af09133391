"""Special tokens of a tokenizer: which text means one, and which ids come in front of a prompt.

The tokenizers library reads the text of a special token in any prompt as that token. A text that must not have any (the
contents of a chat, above all) is shielded: a mark goes into each place that reads as one, also where two texts that a
template joins would. The prompt is then tokenized in parts, between the marks.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer


class SpecialTokens:
    """The special tokens of a tokenizer; `begin` is the text of the one that begins a sequence, empty for none.

    `lead`: the ids that begin a prompt, and stay when it is cut from the left.
    """

    def __init__(self, tokenizer: Tokenizer, begin: str) -> None:
        # Drawn at random, so that no client can put this mark into a text.
        self._mark = f"\ufdd0{secrets.token_hex(8)}\ufdd1"
        added = tokenizer.get_added_tokens_decoder().values()
        texts = {token.content for token in added if token.special and len(token.content) > 1}
        self._pattern = re.compile(_any_of(texts)) if texts else None
        self._prefixes = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, self._prefixes), default=0)
        # Ids that the tokenizer puts in front of a text.
        self.added = _added(tokenizer)
        self.lead = self.added or _begin(tokenizer, begin)

    def shield(self, text: str) -> str:
        """Return a text with marks, so that nothing in it reads as a special token."""
        if self._pattern is None:
            return text
        parts, start = [], 0
        while found := self._pattern.search(text, start):
            parts.append(text[start : found.start() + 1])
            start = found.start() + 1
        parts.append(text[start:])
        if any(text[-length:] in self._prefixes for length in range(1, min(self._longest, len(text)) + 1)):
            parts.append("")  # what follows may complete a special token
        return self._mark.join(parts)

    def parts(self, text: str) -> Sequence[str]:
        """Return the parts of a text between its marks, each to be tokenized by itself."""
        return [part for part in text.split(self._mark) if part] if self._mark in text else (text,)

    def cut(self, ids: Sequence[int], keep: int) -> Sequence[int]:
        """Return the last `keep` ids of a prompt, with its lead."""
        if len(ids) <= keep:
            return ids
        lead = self.lead[:keep] if tuple(ids[: len(self.lead)]) == self.lead else ()
        return [*lead, *ids[len(ids) - keep + len(lead) :]]


def _any_of(texts: Collection[str]) -> str:
    """Return a pattern of the longest of some texts that fits, with common beginnings once.

    A pattern of a thousand alternatives, as some tokenizers have, would try each of them at every `<` of a text.
    """
    rests: dict[str, set[str]] = {}
    for text in texts:
        if text:
            rests.setdefault(text[0], set()).add(text[1:])
    if not rests:
        return ""
    branches = "|".join(re.escape(first) + _any_of(rest) for first, rest in sorted(rests.items()))
    return f"(?:{branches})" + ("?" if "" in texts else "")


def _added(tokenizer: Tokenizer) -> tuple[int, ...]:
    whole, bare = (tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
    starts = range(len(whole) - len(bare) + 1)
    return tuple(whole[: next((at for at in starts if whole[at : at + len(bare)] == bare), 0)])


def _begin(tokenizer: Tokenizer, begin: str) -> tuple[int, ...]:
    """Return the beginning of sequence that a chat template may write."""
    token_id = tokenizer.token_to_id(begin) if begin else None
    return () if token_id is None else (token_id,)
