"""The interface of a base model's text: text to ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.text.chat import ChatTemplate


class TooManyTokensError(Exception):
    """A text of more tokens than its caller takes; `tokens` is their number."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"{tokens} tokens")
        self.tokens = tokens


class TextStream(Protocol):
    """Turns an answer's ids into text, as they come."""

    def push(self, token_id: int) -> str:
        """Return the text that a token adds; a character that is cut in the middle waits for its rest."""

    def flush(self) -> str:
        """Return the text that still waits, after the last id."""


class Text(Protocol):
    """The tokenizer and the chat template of a model."""

    # Maximum bytes of text that one token stands for; None: unknown.
    longest_token: int | None
    chat: ChatTemplate

    def encode(self, text: str, *, special_tokens: bool, limit: int | None = None) -> list[int]:
        """Return the ids of a text; may take long. Raises TooManyTokensError beyond `limit` of them."""

    def encode_input(self, text: str, second: str | None, limit: int, *, truncate: bool) -> tuple[list[int], int]:
        """Return the ids of a text or a pair as a model encodes it, and how many at the end are the second text's.

        Tokens that the tokenizer puts around texts are there. Raises TooManyTokensError beyond `limit` ids, unless
        `truncate`, which cuts the longer text at its end.
        """

    def shield(self, text: str) -> str:
        """Return a text in which `encode` finds no special tokens; they are read as the characters that they are."""

    def cut(self, ids: Sequence[int], keep: int) -> Sequence[int]:
        """Return the last `keep` ids of a prompt, with its beginning of sequence."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, whole: bool = True) -> str:
        """Return the text of ids; unless `whole`, without a character that is cut at the end."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds in the middle of a text."""

    def special_token(self, text: str) -> int | None:
        """Return the id of the special token with this text; None where there is none."""

    def stream(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        echo: bool = False,
        marks: Sequence[str] = (),
    ) -> TextStream:
        """Return a stream for the answer to a prompt; `echo`: after the prompt's text without a cut character.

        Special tokens whose text is one of `marks` are shown anyway.
        """
