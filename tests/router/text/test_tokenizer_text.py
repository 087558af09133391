"""A model's tokenizer: special tokens, the longest text of a token, texts for encoders."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from loraplex.router.request import Chat, ChatMessage, PromptOptions
from loraplex.router.text.file_tokenizer import FileTokenizer, longest_token_bytes
from loraplex.router.text.tokenizer import HashTokenizer, PromptTokenizer, TooManyTokensError
from loraplex.runtime.rpc.errors import InvalidField
from tests.router.small_tokenizers import KINDS, files_of, id_of, tokenizer_of

TEMPLATE = "<s>{% for m in messages %}{{ m.content if m.content is string else m.content | map(attribute='text') | join }}<|end|>{% endfor %}"  # noqa: E501  # one template


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prompt_says_whether_its_special_tokens_are_read(kind: str) -> None:
    text, encode = FileTokenizer(files_of(kind)), PromptTokenizer(1).tokenize
    end, begin = id_of(kind, "<|end|>"), id_of(kind, "<s>")
    prompt = "the<|end|> fox<|end|>"
    whole = await encode(text, prompt, "prompt", "acme", 99)
    assert list(whole) == tokenizer_of(kind).encode(prompt).ids
    assert whole.count(end) == 2
    assert begin not in await encode(text, prompt, "prompt", "acme", 99, PromptOptions(add_special_tokens=False))
    plain = await encode(text, prompt, "prompt", "acme", 99, PromptOptions(parse_special_tokens=False))
    assert (plain[0], plain.count(begin), plain.count(end)) == (begin, 1, 0)
    if kind == "byte-level":
        assert text.decode(plain, skip_special_tokens=True) == prompt
    assert await encode(text, "the", "prompt", "acme", 99, PromptOptions(parse_special_tokens=False)) == tuple(
        tokenizer_of(kind).encode("the").ids
    )


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage("user", "the<|end|>fox<s>"),
        ChatMessage("user", "the <|<|end|>end|>"),
        ChatMessage("user", parts=("the <|", "end|>", " fox <", "s", ">")),
    ],
)
async def test_the_texts_of_a_chat_make_no_special_tokens(message: ChatMessage) -> None:
    text, encoder = FileTokenizer(files_of("byte-level", chat_template=TEMPLATE)), PromptTokenizer(1)
    chat = Chat((message,))
    ids = await encoder.tokenize_chat(text, text.chat, chat, "acme", 200, 0.0)
    begin, end = id_of("byte-level", "<s>"), id_of("byte-level", "<|end|>")
    assert (ids[0], ids.count(begin)) == (begin, 1)
    assert (ids[-1], ids.count(end)) == (end, 1)
    assert text.decode(ids, skip_special_tokens=True) == message.content + "".join(message.parts)
    parsed = await encoder.tokenize_chat(
        text, text.chat, chat, "acme", 200, 0.0, PromptOptions(parse_special_tokens=True)
    )
    assert parsed.count(end) > 1
    encoder.close()


async def test_a_prompt_is_cut_from_the_left_and_keeps_its_beginning() -> None:
    text, encode = FileTokenizer(files_of("byte-level")), PromptTokenizer(1).tokenize
    prompt = "The quick brown fox " * 20
    whole = tokenizer_of("byte-level").encode(prompt).ids
    cut = await encode(text, prompt, "prompt", "acme", 30, PromptOptions(truncate_to=12))
    assert cut == (whole[0], *whole[-11:])
    assert await encode(text, tuple(whole), "token_ids", "acme", 30, PromptOptions(truncate_to=12)) == cut
    assert await encode(text, tuple(whole[1:]), "token_ids", "acme", 30, PromptOptions(truncate_to=2)) == tuple(
        whole[-2:]
    )
    assert await encode(text, "The", "prompt", "acme", 30, PromptOptions(truncate_to=12)) == tuple(
        tokenizer_of("byte-level").encode("The").ids
    )
    with pytest.raises(InvalidField, match=r"is 30 tokens; \d+ tokens do not fit; .*truncate_to"):
        await encode(text, tuple(whole), "token_ids", "acme", 30)


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


WORDS = ["[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]
A, B, C, CLS, SEP = (WORDS.index(word) for word in ("a", "b", "c", "[CLS]", "[SEP]"))


def text_with(processor: processors.PostProcessor) -> FileTokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processor
    return FileTokenizer({"tokenizer.json": tokenizer.to_str().encode()})


BERT = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
ROBERTA = processors.RobertaProcessing(("[SEP]", SEP), ("[CLS]", CLS))
PAIR_TEMPLATE = processors.TemplateProcessing(
    single="[CLS] $A [SEP]",
    pair="[CLS] $A [SEP] $B:1 [SEP]:1",
    special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
)


@pytest.mark.parametrize("processor", [BERT, PAIR_TEMPLATE, ROBERTA], ids=["bert", "template", "roberta"])
def test_the_post_processor_puts_its_tokens_around_texts(processor: processors.PostProcessor) -> None:
    text = text_with(processor)
    assert text.tokenize_input("a b", None, 10, truncate=False) == ([CLS, A, B, SEP], 0)
    between, types = ([SEP, SEP], 0) if processor is ROBERTA else ([SEP], 3)  # RoBERTa has one type of token
    pair = [CLS, A, *between, B, C, SEP]
    assert text.tokenize_input("a", "b c", 10, truncate=False) == (pair, types)
    assert text.tokenize_input("a", "b c", len(pair), truncate=False) == (pair, types)
    for truncate in (True, False):  # a tokenizer that cuts is another one, made once
        assert text.tokenize_input("a b", None, 4, truncate=truncate) == ([CLS, A, B, SEP], 0)
    with pytest.raises(TooManyTokensError) as caught:
        text.tokenize_input("a", "b c", len(pair) - 1, truncate=False)
    assert caught.value.tokens == len(pair)


def test_the_longer_text_is_cut_at_its_end() -> None:
    text = text_with(BERT)
    assert text.tokenize_input("a b c d e", None, 5, truncate=True)[0] == [CLS, A, B, C, SEP]
    assert text.tokenize_input("a b c d e", None, 4, truncate=True)[0] == [CLS, A, B, SEP]
    assert text.tokenize_input("a b c d e", "b", 6, truncate=True) == ([CLS, A, B, SEP, B, SEP], 2)
    assert text.tokenize_input("a", "b c d e f", 6, truncate=True) == ([CLS, A, SEP, B, C, SEP], 3)
    hashed = HashTokenizer()
    assert hashed.tokenize_input("abcdef", "xy", 5, truncate=True) == ([*b"abcxy"], 2)
    assert hashed.tokenize_input("ab", "uvwxyz", 5, truncate=True) == ([*b"abuvw"], 3)
    assert hashed.tokenize_input("abcd", "wxyz", 5, truncate=True) == ([*b"abwxy"], 3)
    with pytest.raises(TooManyTokensError):
        hashed.tokenize_input("abc", "de", 4, truncate=False)


def test_a_model_without_special_tokens_gets_texts_as_they_are() -> None:
    text = text_with(processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[]))
    assert text.tokenize_input("a b", None, 10, truncate=False) == ([A, B], 0)
    assert text.tokenize_input("a b", "c", 10, truncate=False) == ([A, B, C], 1)
