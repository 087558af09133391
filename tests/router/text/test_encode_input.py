"""Texts and pairs as encoders get them: with the tokens of the post-processor, cut where they are too long."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from router.text.text import HashText, TooManyTokensError
from router.text.tokenizer_text import TokenizerText

WORDS = ["[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]
A, B, C, CLS, SEP = (WORDS.index(word) for word in ("a", "b", "c", "[CLS]", "[SEP]"))


def text_with(processor: processors.PostProcessor) -> TokenizerText:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processor
    return TokenizerText({"tokenizer.json": tokenizer.to_str().encode()})


BERT = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
ROBERTA = processors.RobertaProcessing(("[SEP]", SEP), ("[CLS]", CLS))
TEMPLATE = processors.TemplateProcessing(
    single="[CLS] $A [SEP]",
    pair="[CLS] $A [SEP] $B:1 [SEP]:1",
    special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
)


@pytest.mark.parametrize("processor", [BERT, TEMPLATE, ROBERTA], ids=["bert", "template", "roberta"])
def test_the_post_processor_puts_its_tokens_around_texts(processor: processors.PostProcessor) -> None:
    text = text_with(processor)
    assert text.encode_input("a b", None, 10, truncate=False) == ([CLS, A, B, SEP], 0)
    between, types = ([SEP, SEP], 0) if processor is ROBERTA else ([SEP], 3)  # RoBERTa has one type of token
    pair = [CLS, A, *between, B, C, SEP]
    assert text.encode_input("a", "b c", 10, truncate=False) == (pair, types)
    assert text.encode_input("a", "b c", len(pair), truncate=False) == (pair, types)
    for truncate in (True, False):  # a tokenizer that cuts is another one, made once
        assert text.encode_input("a b", None, 4, truncate=truncate) == ([CLS, A, B, SEP], 0)
    with pytest.raises(TooManyTokensError) as caught:
        text.encode_input("a", "b c", len(pair) - 1, truncate=False)
    assert caught.value.tokens == len(pair)


def test_the_longer_text_is_cut_at_its_end() -> None:
    text = text_with(BERT)
    assert text.encode_input("a b c d e", None, 5, truncate=True)[0] == [CLS, A, B, C, SEP]
    assert text.encode_input("a b c d e", None, 4, truncate=True)[0] == [CLS, A, B, SEP]
    assert text.encode_input("a b c d e", "b", 6, truncate=True) == ([CLS, A, B, SEP, B, SEP], 2)
    assert text.encode_input("a", "b c d e f", 6, truncate=True) == ([CLS, A, SEP, B, C, SEP], 3)
    hashed = HashText()
    assert hashed.encode_input("abcdef", "xy", 5, truncate=True) == ([*b"abcxy"], 2)
    assert hashed.encode_input("ab", "uvwxyz", 5, truncate=True) == ([*b"abuvw"], 3)
    assert hashed.encode_input("abcd", "wxyz", 5, truncate=True) == ([*b"abwxy"], 3)
    with pytest.raises(TooManyTokensError):
        hashed.encode_input("abc", "de", 4, truncate=False)


def test_a_model_without_special_tokens_gets_texts_as_they_are() -> None:
    text = text_with(processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[]))
    assert text.encode_input("a b", None, 10, truncate=False) == ([A, B], 0)
    assert text.encode_input("a b", "c", 10, truncate=False) == ([A, B, C], 1)
