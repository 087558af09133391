"""The longest text of a token: never shorter than what a real tokenizer puts into one token."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from router.text.tokenizer_text import longest_token_bytes

SAMPLE = "The quick brown fox — naïve café 日本語 🦊🦊 jumped over the lazy dog.    \n\n" * 3


def byte_level(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(" ", "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end of text>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE], trainer)
    return tokenizer


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_no_text_has_more_bytes_than_its_tokens_may_stand_for(normalizer: normalizers.Normalizer | None) -> None:
    tokenizer = byte_level(normalizer)
    longest = longest_token_bytes(json.loads(tokenizer.to_str()))
    assert longest is not None
    assert longest >= len("<end of text>")
    seed = 3
    print(f"seed {seed}")
    rng = random.Random(seed)
    decomposed = "\u1112\u1161\u11ab"  # three letters of 3 bytes each, which NFC makes one of 3 bytes
    for _ in range(50):
        parts = rng.choices(["<end of text>", "🦊", " " * rng.randrange(1, 20), "e\u0301", decomposed, SAMPLE], k=20)
        text = "".join(parts)
        assert len(text.encode()) <= longest * len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_tokenizers_that_drop_text_give_no_bound() -> None:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    dropping = byte_level()
    dropping.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    plain = Tokenizer(models.BPE({"a": 0}, [], unk_token="a", fuse_unk=True))
    for tokenizer in (words, dropping, byte_level(normalizers.Strip()), plain):
        assert longest_token_bytes(json.loads(tokenizer.to_str())) is None
    swallowing = json.loads(byte_level().to_str())
    swallowing["added_tokens"][0]["rstrip"] = True
    assert longest_token_bytes(swallowing) is None


def test_a_tokenizer_with_byte_fallback_gives_one() -> None:
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = Tokenizer(models.BPE({"▁": 0, "▁ab": 1}, [], byte_fallback=True))
    tokenizer.normalizer = spaces
    assert longest_token_bytes(json.loads(tokenizer.to_str())) == len("▁ab".encode())
    tokenizer.normalizer = normalizers.Replace("ab", "a")
    assert longest_token_bytes(json.loads(tokenizer.to_str())) is None
