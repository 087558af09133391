"""The longest text that a token of a model stands for: with it a text is known to be too long without tokenizing it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
