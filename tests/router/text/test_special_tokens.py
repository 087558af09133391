"""Special tokens of prompts: who may write them, and what stays when a prompt is cut from the left."""

from __future__ import annotations

import pytest

from router.request import Chat, ChatMessage, PromptOptions
from router.text.prompt_encoder import PromptEncoder
from router.text.tokenizer_text import TokenizerText
from rpc.errors import InvalidField
from tests.router.small_tokenizers import KINDS, files_of, id_of, tokenizer_of

TEMPLATE = "<s>{% for m in messages %}{{ m.content if m.content is string else m.content | map(attribute='text') | join }}<|end|>{% endfor %}"  # noqa: E501  # one template


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prompt_says_whether_its_special_tokens_are_read(kind: str) -> None:
    text, encode = TokenizerText(files_of(kind)), PromptEncoder(1).encode
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
    text, encoder = TokenizerText(files_of("byte-level", chat_template=TEMPLATE)), PromptEncoder(1)
    chat = Chat((message,))
    ids = await encoder.encode_chat(text, text.chat, chat, "acme", 200, 0.0)
    begin, end = id_of("byte-level", "<s>"), id_of("byte-level", "<|end|>")
    assert (ids[0], ids.count(begin)) == (begin, 1)
    assert (ids[-1], ids.count(end)) == (end, 1)
    assert text.decode(ids, skip_special_tokens=True) == message.content + "".join(message.parts)
    parsed = await encoder.encode_chat(
        text, text.chat, chat, "acme", 200, 0.0, PromptOptions(parse_special_tokens=True)
    )
    assert parsed.count(end) > 1
    encoder.close()


async def test_a_prompt_is_cut_from_the_left_and_keeps_its_beginning() -> None:
    text, encode = TokenizerText(files_of("byte-level")), PromptEncoder(1).encode
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
    with pytest.raises(InvalidField, match=r"\d+ tokens do not fit the context of 30; .*truncate_to"):
        await encode(text, tuple(whole), "token_ids", "acme", 30)
