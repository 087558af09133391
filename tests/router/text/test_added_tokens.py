"""A model's tokenizer with an adapter's added tokens: ids and texts are those of the tokenizer that training saved."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken as Entry
from tokenizers import Tokenizer

from loraplex.contracts.artifacts.added_tokens import AddedToken
from loraplex.router.text.file_tokenizer import FileTokenizer
from loraplex.runtime.rpc.errors import Mismatch
from tests.router.small_tokenizers import KINDS, files_of, tokenizer_of

TEXTS = (
    "a<call>the fox</call> jumps",
    "<call>",
    " <call> quick  </call>brown <tool>",
    "<CALL> <|end|></call>fox",
    "the fox",
)


def added(kind: str) -> tuple[Tokenizer, tuple[AddedToken, ...]]:
    """The tokenizer that a trainer saves, and its new tokens."""
    tokenizer = Tokenizer.from_str(tokenizer_of(kind).to_str())
    tokenizer.add_tokens(
        [Entry("<call>", special=True, normalized=False), Entry("</call>", lstrip=True, normalized=True)]
    )
    number = int(tokenizer.token_to_id("<call>") or 0)
    return tokenizer, (
        AddedToken(number, "<call>", special=True),
        AddedToken(number + 1, "</call>", lstrip=True, normalized=True),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_tokenizer_that_was_trained_with(kind: str, text: str) -> None:
    trained, tokens = added(kind)
    base = FileTokenizer(files_of(kind))
    own, before = base.with_tokens(tokens), base.tokenize(text, special_tokens=True)
    ids = own.tokenize(text, special_tokens=True)
    assert ids == trained.encode(text).ids
    assert own.decode(ids, skip_special_tokens=False) == FileTokenizer(
        {"tokenizer.json": trained.to_str().encode()}
    ).decode(ids, skip_special_tokens=False)
    assert base.tokenize(text, special_tokens=True) == before, "the model's own stays as it is"
    assert base.with_tokens(tokens) is own
    assert own.added_token("<call>") == tokens[0].id
    assert base.added_token("<call>") is None


def test_the_special_tokens_of_an_adapter_are_shielded_and_skipped() -> None:
    _, tokens = added("byte-level")
    own = FileTokenizer(files_of("byte-level")).with_tokens(tokens)
    assert tokens[0].id not in own.tokenize(own.shield("the<call>fox"), special_tokens=False)
    assert own.decode([tokens[0].id, tokens[1].id], skip_special_tokens=True) == "</call>"


def test_a_number_that_the_tokenizer_does_not_give_is_refused() -> None:
    _, (first, _) = added("byte-level")
    base = FileTokenizer(files_of("byte-level"))
    with pytest.raises(Mismatch, match="its token '<call>' is not number"):
        base.with_tokens((AddedToken(first.id + 1, "<call>"),))
