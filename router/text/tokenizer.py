"""The tokenizers of base models: text to ids and back, by a tokenizer.json, as bytes for the hash model, or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from router.text.chat import ChatTemplate
from rpc.errors import Internal, InvalidField


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


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise Internal, reason TOKENIZER_FAILED, where the library panics."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        line = str(error).partition("\n")[0][:200]
        raise Internal(f"the model's tokenizer failed: {line}", reason="TOKENIZER_FAILED") from None


# Chat template of the hash model; tools are called in Hermes' format.
_HASH_TEMPLATE = (
    "{% if tools %}<tool_call> {{ tools | tojson }}{{ '\\n' }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class ModelTokenizer:
    """The tokenizer and the chat template of a model; this one is of a model without: its requests have ids alone."""

    # Maximum bytes of text that one token stands for; None: unknown.
    longest_token: int | None = None
    chat = ChatTemplate()

    def tokenize(self, text: str, *, special_tokens: bool, limit: int | None = None) -> list[int]:
        """Return the ids of a text; may take long. Raises InvalidField, or TooManyTokensError beyond `limit` ids."""
        raise InvalidField("prompt", "the model has no tokenizer.json; send token_ids")

    def tokenize_input(self, text: str, second: str | None, limit: int, *, truncate: bool) -> tuple[list[int], int]:
        """Return the ids of a text or a pair as a model takes it, and how many at the end are the second text's.

        Tokens that the tokenizer puts around texts are there. Raises TooManyTokensError beyond `limit` ids, unless
        `truncate`, which cuts the longer text at its end; or InvalidField.
        """
        raise InvalidField("inputs", "the model has no tokenizer.json; send token_ids")

    def shield(self, text: str) -> str:
        """Return a text in which `tokenize` finds no special tokens but the characters that they are written with."""
        return text

    def cut(self, ids: Sequence[int], keep: int) -> Sequence[int]:
        """Return the last `keep` ids of a prompt, with its beginning of sequence."""
        return ids[-keep:]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, whole: bool = True) -> str:
        """Return the text of ids; unless `whole`, without a character that is cut at the end."""
        return "".join(map(self.push, ids))

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds in the middle of a text."""
        return self.push(token_id).encode()

    def special_token(self, text: str) -> int | None:
        """Return the id of the special token with this text; None where there is none."""
        return None

    def stream(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool, echo: bool = False, marks: Sequence[str] = ()
    ) -> TextStream:
        """Return a stream for the answer to a prompt; `echo`: after the prompt's text without a cut character.

        Special tokens whose text is one of `marks` are shown anyway.
        """
        return self  # no token waits for another

    def push(self, token_id: int) -> str:
        """See TextStream."""
        return ""

    def flush(self) -> str:
        """See TextStream."""
        return ""


class HashTokenizer(ModelTokenizer):
    """The hash model's: bytes for ids below 256, `<id>` for the others."""

    longest_token = 1
    chat = ChatTemplate(_HASH_TEMPLATE)

    def tokenize(self, text: str, *, special_tokens: bool, limit: int | None = None) -> list[int]:
        """See ModelTokenizer; there are no special tokens."""
        data = text.encode()
        if limit is not None and len(data) > limit:
            raise TooManyTokensError(len(data))
        return list(data)

    def tokenize_input(self, text: str, second: str | None, limit: int, *, truncate: bool) -> tuple[list[int], int]:
        """See ModelTokenizer: the bytes of the texts."""
        first, other = text.encode(), (second or "").encode()
        if (excess := len(first) + len(other) - limit) > 0:
            if not truncate:
                raise TooManyTokensError(len(first) + len(other))
            # The longer one loses the difference first, then both the same.
            of_other = max(0, min(excess, (excess + len(other) - len(first)) // 2))
            first, other = first[: len(first) - excess + of_other], other[: len(other) - of_other]
        return [*first, *other], len(other)

    def push(self, token_id: int) -> str:
        """See TextStream: one byte reads as its Latin-1 character, so that none waits for another."""
        return chr(token_id) if token_id < 256 else f"<{token_id}>"


def tokenizer_of(architecture: str, files: Mapping[str, bytes]) -> ModelTokenizer:
    """Make the tokenizer of a base model from its manifest. Raises ValueError on a broken file."""
    if architecture == "hash":
        return HashTokenizer()
    if "tokenizer.json" not in files:
        return ModelTokenizer()
    # Imported for such a model alone: the libraries of tokenizers and templates take a quarter of a router's start.
    from router.text.file_tokenizer import FileTokenizer

    return FileTokenizer(files)
