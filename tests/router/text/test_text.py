"""Tokenizing and incremental detokenizing, against the tokenizers library's whole decode."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from loraplex.router.catalog.models import tokenizer_of
from loraplex.router.text.file_tokenizer import FileTokenizer
from loraplex.router.text.tokenizer import HashTokenizer, ModelTokenizer, PromptTokenizer, bad_word_ids
from loraplex.runtime.rpc.errors import InvalidField

SAMPLE = "The quick brown fox — naïve café 日本語 🦊🦊 jumped over the lazy dog. " * 3


async def encode_prompt(text: ModelTokenizer, prompt: str | tuple[int, ...], field: str) -> tuple[int, ...]:
    return await PromptTokenizer(1).tokenize(text, prompt, field, "acme", 512)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE], trainer)
    return {"tokenizer.json": tokenizer.to_str().encode()}


def test_streaming_equals_decoding_the_whole(files: dict[str, bytes]) -> None:
    text = FileTokenizer(files)
    prompt = text.tokenize("The quick 🦊", special_tokens=True)
    seed = 7
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(50):
        # Random ids cut characters in the middle again and again, also at the end.
        ids = [rng.randrange(1, 300) for _ in range(rng.randrange(1, 40))]
        stream = text.stream(prompt, skip_special_tokens=True)
        streamed = "".join(stream.push(token_id) for token_id in ids) + stream.flush()
        whole = text.decode([*prompt, *ids], skip_special_tokens=True)
        assert "The quick 🦊" + streamed == whole


def test_special_tokens_are_shown_only_when_asked_for(files: dict[str, bytes]) -> None:
    text = FileTokenizer(files)
    ids = [*text.tokenize("fox", special_tokens=True), 0]
    for skip, expected in ((True, "fox"), (False, "fox<end>")):
        stream = text.stream([], skip_special_tokens=skip)
        assert "".join(stream.push(token_id) for token_id in ids) + stream.flush() == expected


def test_bad_words_are_forbidden_with_a_space_before_them_too(files: dict[str, bytes]) -> None:
    text = FileTokenizer(files)

    def ids(word: str) -> tuple[int, ...]:
        return tuple(text.tokenize(word, special_tokens=False))

    assert bad_word_ids(text, ["quick", "  quick", "The", " ", "<end>"]) == tuple(
        map(ids, ("quick", " quick", "The", " The", " ", "  ", "<end>", " <end>"))
    )
    assert ids("<end>") == (0,)
    with pytest.raises(InvalidField, match=r"sampling.bad_words: the model has no tokenizer.json"):
        bad_word_ids(ModelTokenizer(), ["fox"])


async def test_a_model_without_tokenizer_takes_ids_only() -> None:
    text = tokenizer_of("llama", {})
    assert isinstance(text, ModelTokenizer)
    assert await encode_prompt(text, (1, 2), "token_ids") == (1, 2)
    with pytest.raises(InvalidField, match=r"tokenizer\.json"):
        await encode_prompt(text, "words", "prompt")


async def test_the_hash_model_reads_bytes() -> None:
    text = tokenizer_of("hash", {})
    assert isinstance(text, HashTokenizer)
    assert await encode_prompt(text, "hé", "prompt") == (104, 195, 169)
    assert text.decode([104, 300], skip_special_tokens=True) == "h<300>"


def test_a_broken_tokenizer_is_named() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        tokenizer_of("llama", {"tokenizer.json": b"{"})
