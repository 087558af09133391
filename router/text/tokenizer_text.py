"""Text of a model with a tokenizer.json, by the tokenizers library and the model's own chat template.

As a child process of rpc.children this module tries out the files of a base model, and ends. What kills, hangs or blows
up that process is not loaded by the router: files may be made for that, and the library panics, recurses and backtracks
on some.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from tokenizers import Tokenizer

from router.text.chat import ChatTemplate
from router.text.detokenizer import Detokenizer
from router.text.text import TextStream, TooManyTokensError, panics_as_errors
from rpc.children.child import LAST, Json, serve

# Parts of a tokenizer that never make a text shorter.
_LOSSLESS = frozenset({"ByteLevel", "Prepend", "Metaspace", "Digits", "Split", "Sequence"})
# Factor by which NFC makes a text shorter at most, in bytes: three Hangul letters of 3 bytes are one syllable of 3.
_NFC_FACTOR = 3


def longest_token_bytes(tokenizer_json: Mapping[str, Any]) -> int | None:
    """Return the maximum bytes of text that one token stands for; None where a token may stand for any text.

    A tokenizer with unknown tokens, or one that drops a part of the text, gives no such bound.
    """
    model, added = tokenizer_json["model"], tokenizer_json.get("added_tokens") or []
    parts = [part for name in ("normalizer", "pre_tokenizer") for part in _parts(tokenizer_json.get(name))]
    kinds = {part["type"] for part in parts}
    whole = "ByteLevel" in kinds or bool(model.get("byte_fallback"))
    if model.get("type") != "BPE" or not whole or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    if not kinds <= _LOSSLESS | {"NFC", "Replace"} or not all(map(_keeps_length, parts)):
        return None
    texts = [*model["vocab"], *(token["content"] for token in added)]
    # Byte-level vocabularies write a byte as a character of one or two bytes, so that this is never too short.
    longest = max((len(text.encode()) for text in texts), default=1)
    return longest * _NFC_FACTOR if "NFC" in kinds else longest


def _parts(part: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    """Return a part of a tokenizer and, of a sequence, its parts."""
    if part is None:
        return []
    inner = [*part.get("normalizers", ()), *part.get("pretokenizers", ())]
    return [part, *(found for one in inner for found in _parts(one))]


def _keeps_length(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"].encode()) >= len(pattern.encode())
    return part.get("behavior") != "Removed"


class SpecialTokens:
    """The special tokens of a tokenizer; `begin` is the text of the one that begins a sequence, empty for none.

    The tokenizers library reads the text of a special token in any prompt as that token. A text that must not have any
    (the contents of a chat, above all) is shielded: a mark goes into each place that reads as one, also where two texts
    that a template joins would. The prompt is then tokenized in parts, between the marks.

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


class TokenizerText:
    """The text of a model with a tokenizer.json."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        data = json.loads(files["tokenizer.json"])
        self.longest_token = longest_token_bytes(data)
        self._detokenizer = Detokenizer(self._tokenizer, data)
        self.chat = ChatTemplate.of_files(files)
        # Maximum ids of a truncating tokenizer, and that tokenizer; made when it is first needed.
        self._cut_to: tuple[int, Tokenizer] | None = None
        self._special = SpecialTokens(self._tokenizer, self.chat.tokens.get("bos_token", ""))

    def encode(self, text: str, *, special_tokens: bool, limit: int | None = None) -> list[int]:
        """See Text."""
        parts = self._special.parts(text)
        added = list(self._special.added) if special_tokens and len(parts) > 1 else []
        # Only the batch call releases the interpreter's lock; offsets are not needed.
        with panics_as_errors():
            encodings = self._tokenizer.encode_batch_fast(parts, add_special_tokens=special_tokens and not added)
        count = len(added) + sum(map(len, encodings))
        if limit is not None and count > limit:  # before the ids become objects
            raise TooManyTokensError(count)
        return added + [token_id for encoding in encodings for token_id in encoding.ids]

    def encode_input(self, text: str, second: str | None, limit: int, *, truncate: bool) -> tuple[list[int], int]:
        """See Text; as transformers does it, with the post-processor of tokenizer.json."""
        tokenizer = self._truncating(limit) if truncate else self._tokenizer
        with panics_as_errors():
            (encoding,) = tokenizer.encode_batch_fast([text if second is None else (text, second)])
        if len(encoding) > limit:
            raise TooManyTokensError(len(encoding))
        types = encoding.type_ids if second is not None else ()
        return encoding.ids, sum(1 for _ in takewhile(bool, reversed(types)))

    def _truncating(self, limit: int) -> Tokenizer:
        """Return a tokenizer that cuts texts to `limit` ids; the setting is one of the whole tokenizer."""
        if self._cut_to is None or self._cut_to[0] != limit:
            tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
            tokenizer.enable_truncation(limit, strategy="longest_first")
            self._cut_to = limit, tokenizer
        return self._cut_to[1]

    def shield(self, text: str) -> str:
        """See Text."""
        return self._special.shield(text)

    def cut(self, ids: Sequence[int], keep: int) -> Sequence[int]:
        """See Text."""
        return self._special.cut(ids, keep)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, whole: bool = True) -> str:
        """See Text."""
        return self._detokenizer.decode(ids, skip_special_tokens=skip_special_tokens, whole=whole)

    def bytes_of(self, token_id: int) -> bytes:
        """See Text."""
        return self._detokenizer.inner[token_id]

    def special_token(self, text: str) -> int | None:
        """See Text."""
        token_id = self._tokenizer.token_to_id(text)
        return token_id if token_id in self._detokenizer.special else None

    def stream(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        echo: bool = False,
        marks: Sequence[str] = (),
    ) -> TextStream:
        """See Text."""
        shown = frozenset(map(self.special_token, marks))
        skipped = self._detokenizer.special - shown if skip_special_tokens else frozenset[int]()
        return self._detokenizer.stream(prompt_ids, skipped=skipped, echo=echo)


# Maximum processor time in seconds, and address space in bytes. A tokenizer of 128,000 tokens takes 0.3 s and 110 MB.
CPU_S = 20.0
MEMORY_BYTES = 4 << 30
# Texts of a few characters first, then of 2,000, which a router tokenizes on its event loop; each also with an end that
# makes a regular expression try again. And the most tokens that a character may be.
_PIECES = ("a", " ", "1", "\n", "-", "é", "<", "The 2 cats' toys, \n\tsaid she. ", "日本", "🙂", "\u0301", "aA1 ")
_SAMPLES = tuple(
    (piece * size)[:size] + end for size in (1, 20, 2_000) for piece in _PIECES for end in ("", "!", "\u2028")
)
_TOKENS_A_CHARACTER = 32
# Maximum characters that a token of an answer may be.
_CHARACTERS_A_TOKEN = 65_536


def _answer(request: Mapping[str, Any]) -> Json:
    """Return nothing but the mark of the last answer, or why the files cannot be used."""
    try:
        with panics_as_errors():
            _try_out({name: text.encode() for name, text in request["files"].items()})
    except MemoryError:
        return {"error": "needs too much memory", LAST: True}
    except Exception as error:  # anybody may have written the files
        return {"error": f"{type(error).__name__}: {error}"[:300], LAST: True}
    return {LAST: True}


def _try_out(files: Mapping[str, bytes]) -> None:
    text = TokenizerText(files)
    for sample in _SAMPLES:
        ids = text.encode(sample, special_tokens=True)
        if len(ids) > _TOKENS_A_CHARACTER * len(sample):
            raise ValueError(f"makes {len(ids)} tokens of {len(sample)} characters")
        if len(shown := text.decode(ids, skip_special_tokens=False)) > _CHARACTERS_A_TOKEN * len(ids):
            raise ValueError(f"makes {len(shown)} characters of {len(ids)} tokens")


if __name__ == "__main__":
    serve(_answer, cpu_s=lambda request: CPU_S, memory_bytes=MEMORY_BYTES)
