"""Token ids to text, as they come: every token stands for bytes, and text is the UTF-8 reading of their sequence.

    ids ──▶ bytes of each token ──▶ characters, as they become whole; U+FFFD for bytes that no character begins with

So the pieces of a stream always add up to the text of all its ids, wherever they are cut, and what is shown is never
taken back. The tokenizers library agrees, but for bytes of `<0x..>` tokens that are no UTF-8: it shows the whole run of
such tokens as U+FFFD, also the characters that were whole before.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from router.text.text import panics_as_errors

# Text of bytes that are no character.
CUT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# Number of bytes at the end of a text that decide whether its last character is cut.
_CHARACTER_BYTES = 4
# Maximum number of ids at a prompt's end that are looked at for these bytes: all others may be skipped, or no tokens.
_TAIL_IDS = 256
_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The bytes of each token of a tokenizer. `special`: ids that are left out where special tokens are skipped."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        kinds = {part["type"] for part in _parts(tokenizer_json.get("decoder"))}
        self._letters = _letters() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self.special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self.inner = _InnerBytes(self)
        self._anchor, self._anchor_text = self._find_anchor()

    def _find_anchor(self) -> tuple[list[int], str]:
        """Return a token of plain letters and its text, to see what others add after it."""
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
        found = self[token_id] = self._detokenizer.bytes_of(token_id, first=False)
        return found


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


def _parts(decoder: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    """Return a decoder and, of a sequence, its parts."""
    if decoder is None:
        return []
    return [decoder, *(found for part in decoder.get("decoders", ()) for found in _parts(part))]
