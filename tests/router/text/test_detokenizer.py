"""Ids to text, one by one: equal to the text of all ids, wherever they begin, for each kind of tokenizer."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, models

from loraplex.router.text.file_tokenizer import FileTokenizer
from tests.router.small_tokenizers import KINDS, files_of, id_of, text_of_ids, tokenizer_of


def streamed(text: FileTokenizer, prompt: list[int], ids: list[int], *, skip: bool, echo: bool) -> str:
    stream = text.stream(prompt, skip_special_tokens=skip, echo=echo)
    return "".join(map(stream.push, ids)) + stream.flush()


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_stream_and_of_its_prompt_is_that_of_all_ids(kind: str, skip: bool) -> None:
    text, vocab = FileTokenizer(files_of(kind)), tokenizer_of(kind).get_vocab_size()
    seed = 20261122
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        # Random ids cut characters in the middle again and again; two beyond the vocabulary are of no token.
        prompt = [rng.randrange(vocab + 2) for _ in range(rng.randrange(8))]
        ids = [rng.randrange(vocab + 2) for _ in range(rng.randrange(1, 30))]
        known = [token_id for token_id in prompt + ids if token_id < vocab]
        whole = text_of_ids(kind, known, skip_special_tokens=skip)
        assert text.decode(prompt + ids, skip_special_tokens=skip) == whole
        shown = text.decode(prompt, skip_special_tokens=skip, whole=False)
        assert shown + streamed(text, prompt, ids, skip=skip, echo=True) == whole
        # Without the prompt's text: what comes after it, and a character of which the prompt has the first bytes.
        before = text_of_ids(kind, [i for i in prompt if i < vocab], skip_special_tokens=skip)
        at = len(before) if whole.startswith(before) else len(before) - 1
        assert streamed(text, prompt, ids, skip=skip, echo=False) == whole[at:]


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_valid_ids_is_that_of_the_library(kind: str) -> None:
    text, tokenizer = FileTokenizer(files_of(kind)), tokenizer_of(kind)
    for words in ("the quick fox.", "café 日本 🦊 doesn't, the!", "<tool> the <|end|><s>", " the  fox "):
        ids = tokenizer.encode(words).ids
        for skip in (True, False):
            assert text.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_make_up_their_text(kind: str) -> None:
    text = FileTokenizer(files_of(kind))
    ids = text.tokenize("the café 日本 🦊 doesn't", special_tokens=False)
    made = b"".join(map(text.bytes_of, ids)).decode()
    assert made.strip() == text.decode(ids, skip_special_tokens=False).strip()


def test_bytes_that_are_no_character_take_nothing_back() -> None:
    """The library's own stream raises an error here, and its whole decode takes the first character back."""
    text, the = FileTokenizer(files_of("byte fallback")), id_of("byte fallback", "▁the")
    ids = [id_of("byte fallback", f"<0x{byte:02X}>") for byte in (0xE6, 0x97, 0xA5, 0xFF, 0x41)]
    stream = text.stream([the], skip_special_tokens=True)
    assert [stream.push(token_id) for token_id in ids] == ["", "", "日", "\ufffd", "A"]
    assert text.decode([*ids, the], skip_special_tokens=True) == "日\ufffdA the"


def test_a_tokenizer_without_decoder_is_read_as_the_library_reads_it() -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1, "?": 2}, unk_token="?"))
    text = FileTokenizer({"tokenizer.json": tokenizer.to_str().encode()})
    assert text.decode([0, 1, 2, 0], skip_special_tokens=True) == tokenizer.decode([0, 1, 2, 0]) == "a b ? a"


def test_a_prompt_of_ids_without_text_is_not_read_to_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    text, looked = FileTokenizer(files_of(KINDS[0])), list[int]()

    def has_not(token_id: int) -> bool:
        looked.append(token_id)
        return False

    monkeypatch.setattr(text._detokenizer, "has", has_not)
    text.stream(range(10**6, 10**6 + 100_000), skip_special_tokens=True)
    assert len(looked) <= 256
