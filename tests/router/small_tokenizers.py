"""Small tokenizers of the three kinds that served models have, with two special tokens and one added token each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SAMPLE = "The quick brown fox — naïve café 日本語 🦊🦊 doesn't jump, over the lazy dog. " * 3
KINDS = ("byte-level", "byte fallback", "WordPiece")
_SPECIAL = ("<s>", "<|end|>")


@lru_cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Return the tokenizer of a kind; it puts `<s>` in front of a prompt."""
    tokenizer = {"byte-level": _byte_level, "byte fallback": _byte_fallback, "WordPiece": _word_piece}[kind]()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return tokenizer


def files_of(kind: str, **config: object) -> dict[str, bytes]:
    """Return a model's files with this tokenizer; `config` are fields of tokenizer_config.json."""
    return {
        "tokenizer.json": tokenizer_of(kind).to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "<|end|>", **config}).encode(),
    }


def id_of(kind: str, token: str) -> int:
    """Return a token's id."""
    found = tokenizer_of(kind).token_to_id(token)
    assert found is not None
    return found


def text_of_ids(kind: str, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of ids, made without the code under test."""
    tokenizer = tokenizer_of(kind)
    if kind != "byte fallback":
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
    # The library shows a run of byte tokens with one bad byte as U+FFFD alone.
    special = {tokenizer.token_to_id(token) for token in _SPECIAL}
    pieces = [tokenizer.id_to_token(i) or "" for i in ids if not (skip_special_tokens and i in special)]
    return b"".join(map(_fallback_bytes, pieces)).removeprefix(b" ").decode(errors="replace")


def _fallback_bytes(piece: str) -> bytes:
    if piece.startswith("<0x"):
        return bytes.fromhex(piece[3:5])
    return piece.replace("▁", " ").encode()


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([SAMPLE], trainer)
    return tokenizer


def _byte_fallback() -> Tokenizer:
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz.", "▁t", "▁th", "▁the", "é", "日", "本"]
    vocab = {piece: at for at, piece in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _word_piece() -> Tokenizer:
    words = ["[UNK]", "the", "quick", "do", "##es", "##n", "'", "t", ",", ".", "!", "fox", "日", "##本", "caf", "##é"]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return tokenizer
