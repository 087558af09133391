"""The tokenizer of a model with a tokenizer.json, by the tokenizers library, and its ids to text as they come.

    ids ──▶ bytes of each token ──▶ characters, as they become whole; U+FFFD for bytes that no character begins with

Every token stands for bytes, and text is the UTF-8 reading of their sequence. So the pieces of a stream always add up
to the text of all its ids, wherever they are cut, and what is shown is never taken back. The tokenizers library agrees,
but for bytes of `<0x..>` tokens that are no UTF-8: it shows the whole run of such tokens as U+FFFD, also the characters
that were whole before.

As a child process of rpc.children this module tries out the files of a base model, and ends. What kills, hangs or blows
up that process is not loaded by the router: files may be made for that, and the library panics, recurses and backtracks
on some.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict
from functools import lru_cache
from itertools import takewhile
from typing import Any

from tokenizers import Tokenizer

from loraplex.contracts.artifacts.added_tokens import AddedToken
from loraplex.router.text.chat import ChatTemplate
from loraplex.router.text.tokenizer import ModelTokenizer, TextStream, TooManyTokensError, panics_as_errors
from loraplex.runtime.rpc.children.child import LAST, Json, serve
from loraplex.runtime.rpc.errors import Mismatch

# Parts of a tokenizer that never make a text shorter.
_LOSSLESS = frozenset({"ByteLevel", "Prepend", "Metaspace", "Digits", "Split", "Sequence"})
# Factor by which NFC makes a text shorter at most, in bytes: three Hangul letters of 3 bytes are one syllable of 3.
_NFC_FACTOR = 3
# Text of bytes that are no character.
CUT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# Number of bytes at the end of a text that decide whether its last character is cut.
_CHARACTER_BYTES = 4
# Maximum number of ids at a prompt's end that are looked at for these bytes: all others may be skipped, or no tokens.
_TAIL_IDS = 256
_decoder = codecs.getincrementaldecoder("utf-8")


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
    inner = [one for name in ("normalizers", "pretokenizers", "decoders") for one in part.get(name, ())]
    return [part, *(piece for one in inner for piece in _parts(one))]


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
        while match := self._pattern.search(text, start):
            parts.append(text[start : match.start() + 1])
            start = match.start() + 1
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


class Detokenizer:
    """The bytes of each token of a tokenizer. `special`: ids that are left out where special tokens are skipped."""

    def __init__(self, tokenizer: Tokenizer, decoder: Mapping[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        kinds = {part["type"] for part in _parts(decoder)}
        self._letters = _letters() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        added = tokenizer.get_added_tokens_decoder()
        self.added = frozenset(added)
        self.special = frozenset(i for i, token in added.items() if token.special)
        self.inner = _InnerBytes(self)
        self._anchor, self._anchor_text = self._find_anchor()

    def _find_anchor(self) -> tuple[list[int], str]:
        """Return a token of plain letters and its text, behind which other tokens' texts are measured."""
        if self._letters is None:
            for token_id in range(self._tokenizer.get_vocab_size()):
                text = self._decoded([token_id])
                if text.isascii() and text.isalnum() and self._decoded([token_id, token_id]).startswith(text):
                    return [token_id], text
        return [], ""

    def _decoded(self, ids: list[int]) -> str:
        with panics_as_errors():
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def has(self, token_id: int) -> bool:
        """Return whether there is such a token: the vocabularies of models are padded."""
        return self._tokenizer.id_to_token(token_id) is not None

    def bytes_of(self, token_id: int, *, first: bool) -> bytes:
        """Return the bytes of a token; many tokenizers leave out the space in front of the first token of a text."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._letters is not None:
            return self._letter_bytes(token, self._letters)
        text = self._decoded([token_id] if first else [*self._anchor, token_id])
        if self._byte_fallback and (byte := _BYTE.fullmatch(token)) and not (first and CUT not in text):
            return bytes.fromhex(byte[1])
        return (text if first else text.removeprefix(self._anchor_text)).encode()

    @staticmethod
    def _letter_bytes(token: str, letters: Mapping[str, int]) -> bytes:
        try:
            return bytes([letters[letter] for letter in token])
        except KeyError:  # an added token, in letters of its own
            return token.encode()

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool, whole: bool = True) -> str:
        """Return the text of ids; unless `whole`, without a character that is cut at the end."""
        special = self.special if skip_special_tokens else frozenset[int]()
        shown, parts = (token_id for token_id in ids if token_id not in special), []
        for token_id in shown:
            parts.append(self.bytes_of(token_id, first=True))
            if self.has(token_id):
                break
        parts.extend(map(self.inner.__getitem__, shown))
        return _decoder("replace").decode(b"".join(parts), whole)

    def stream(self, prompt_ids: Sequence[int], *, skipped: frozenset[int], echo: bool) -> TokenStream:
        """Return a stream for the ids after a prompt, without those that are `skipped`.

        `echo`: the prompt's text is shown before them.
        """
        tail = b""
        first = True
        for token_id in reversed(prompt_ids[-_TAIL_IDS:]):
            if token_id not in skipped and self.has(token_id):
                first = False
                tail = self.inner[token_id] + tail
                if len(tail) >= _CHARACTER_BYTES:
                    break
        return TokenStream(self, skipped, tail, first=first, echo=echo)


class _InnerBytes(dict[int, bytes]):
    """The bytes of tokens that are not the first of a text, by id, each found when it is needed first."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer

    def __missing__(self, token_id: int) -> bytes:
        token_bytes = self[token_id] = self._detokenizer.bytes_of(token_id, first=False)
        return token_bytes


class TokenStream:
    """The text of an answer's ids; `tail`: the prompt's last bytes, whose last character the answer may complete."""

    def __init__(
        self, detokenizer: Detokenizer, skipped: frozenset[int], tail: bytes, *, first: bool, echo: bool
    ) -> None:
        self._detokenizer = detokenizer
        self._skipped = skipped
        self._first = first
        self._decoder = _decoder("replace")
        self._decoder.decode(tail)
        # Text of the prompt's last bytes where the answer completes no character with them: no part of the answer.
        self._prompt_text = "" if echo else self._decoder.getstate()[0].decode(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that a token adds; a character that is cut waits for its rest."""
        if token_id in self._skipped:
            return ""
        if self._first:
            piece = self._detokenizer.bytes_of(token_id, first=True)
            self._first = not self._detokenizer.has(token_id)
        else:
            piece = self._detokenizer.inner[token_id]
        text = self._decoder.decode(piece)
        return self._without_prompt(text) if self._prompt_text else text

    def flush(self) -> str:
        """Return the text that still waits, after the last id."""
        text = self._decoder.decode(b"", True)
        return self._without_prompt(text) if self._prompt_text else text

    def _without_prompt(self, text: str) -> str:
        if text:
            text, self._prompt_text = text.removeprefix(self._prompt_text), ""
        return text


def _letters() -> dict[str, int]:
    """Return the byte of each letter in which byte-level vocabularies write bytes, as GPT-2's bytes_to_unicode."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


# Maximum number of tokenizers with added tokens that are kept for a model.
_WITH_TOKENS = 256


def _with_tokens(tokenizer: Tokenizer, tokens: tuple[AddedToken, ...]) -> Tokenizer:
    """Return a tokenizer that shares a tokenizer's vocabulary and has more added tokens. Raises Mismatch."""
    from tokenizers import AddedToken as Entry

    own = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(own, part, value)
    with panics_as_errors():
        own.add_tokens([token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())])
        own.add_tokens(
            [Entry(**{name: value for name, value in asdict(token).items() if name != "id"}) for token in tokens]
        )
    for token in tokens:
        if own.token_to_id(token.content) != token.id:
            raise Mismatch(
                "adapter", f"its token {token.content!r:.80} is not number {token.id} of the model's tokenizer"
            )
    return own


class FileTokenizer(ModelTokenizer):
    """The tokenizer of a model with a tokenizer.json."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        data = json.loads(files["tokenizer.json"])
        self.longest_token = longest_token_bytes(data)
        self._decoder = data.get("decoder")
        self.chat = ChatTemplate.of_files(files)
        # Those with adapters' own tokens, by these; all share the model's vocabulary.
        self._adapted = lru_cache(_WITH_TOKENS)(self._adapt)
        self._prepare()

    def _prepare(self) -> None:
        self._detokenizer = Detokenizer(self._tokenizer, self._decoder)
        # Maximum ids of a truncating tokenizer, and that tokenizer; made when it is first needed.
        self._cut_to: tuple[int, Tokenizer] | None = None
        self._special = SpecialTokens(self._tokenizer, self.chat.tokens.get("bos_token", ""))

    def with_tokens(self, tokens: tuple[AddedToken, ...]) -> FileTokenizer:
        """See ModelTokenizer."""
        return self._adapted(tokens) if tokens else self

    def _adapt(self, tokens: tuple[AddedToken, ...]) -> FileTokenizer:
        own = copy(self)
        own._tokenizer = _with_tokens(self._tokenizer, tokens)
        if self.longest_token is not None:
            stripped = any(token.lstrip or token.rstrip for token in tokens)
            longest = max(self.longest_token, *(len(token.content.encode()) for token in tokens))
            own.longest_token = None if stripped else longest
        own._prepare()
        return own

    def tokenize(self, text: str, *, special_tokens: bool, limit: int | None = None) -> list[int]:
        """See ModelTokenizer."""
        parts = self._special.parts(text)
        added = list(self._special.added) if special_tokens and len(parts) > 1 else []
        # Only the batch call releases the interpreter's lock; offsets are not needed.
        with panics_as_errors():
            encodings = self._tokenizer.encode_batch_fast(parts, add_special_tokens=special_tokens and not added)
        count = len(added) + sum(map(len, encodings))
        if limit is not None and count > limit:  # before the ids become objects
            raise TooManyTokensError(count)
        return added + [token_id for encoding in encodings for token_id in encoding.ids]

    def tokenize_input(self, text: str, second: str | None, limit: int, *, truncate: bool) -> tuple[list[int], int]:
        """See ModelTokenizer; as transformers does it, with the post-processor of tokenizer.json."""
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
        """See ModelTokenizer."""
        return self._special.shield(text)

    def cut(self, ids: Sequence[int], keep: int) -> Sequence[int]:
        """See ModelTokenizer."""
        return self._special.cut(ids, keep)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, whole: bool = True) -> str:
        """See ModelTokenizer."""
        return self._detokenizer.decode(ids, skip_special_tokens=skip_special_tokens, whole=whole)

    def bytes_of(self, token_id: int) -> bytes:
        """See ModelTokenizer."""
        return self._detokenizer.inner[token_id]

    def added_token(self, text: str) -> int | None:
        """See ModelTokenizer."""
        token_id = self._tokenizer.token_to_id(text)
        return token_id if token_id in self._detokenizer.added else None

    def stream(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool, echo: bool = False, marks: Sequence[str] = ()
    ) -> TextStream:
        """See ModelTokenizer."""
        shown = frozenset(map(self.added_token, marks))
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
    tokenizer = FileTokenizer(files)
    for sample in _SAMPLES:
        ids = tokenizer.tokenize(sample, special_tokens=True)
        if len(ids) > _TOKENS_A_CHARACTER * len(sample):
            raise ValueError(f"makes {len(ids)} tokens of {len(sample)} characters")
        if len(shown := tokenizer.decode(ids, skip_special_tokens=False)) > _CHARACTERS_A_TOKEN * len(ids):
            raise ValueError(f"makes {len(shown)} characters of {len(ids)} tokens")


if __name__ == "__main__":
    serve(_answer, cpu_s=lambda request: CPU_S, memory_bytes=MEMORY_BYTES)
