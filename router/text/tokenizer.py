"""Text of every base model: with its own tokenizer, as bytes for the hash model, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.text.chat import ChatTemplate
from router.text.text import Text, TextStream, TooManyTokensError
from rpc.errors import InvalidField

# Chat template of the hash model; tools are called in Hermes' format.
_HASH_TEMPLATE = (
    "{% if tools %}<tool_call> {{ tools | tojson }}{{ '\\n' }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def text_of(architecture: str, files: Mapping[str, bytes]) -> Text:
    """Make the Text of a base model from its manifest. Raises ValueError on a broken tokenizer."""
    if architecture == "hash":
        return HashText()
    if "tokenizer.json" not in files:
        return NoText()
    # Imported for such a model alone: the libraries of tokenizers and templates take a quarter of a router's start.
    from router.text.tokenizer_text import TokenizerText

    return TokenizerText(files)


class _PlainText:
    """The text of a model without special tokens, whose stream has no state."""

    def shield(self, text: str) -> str:
        """See Text."""
        return text

    def cut(self, ids: Sequence[int], keep: int) -> Sequence[int]:
        """See Text."""
        return ids[-keep:]

    def bytes_of(self, token_id: int) -> bytes:
        """See Text."""
        return self.push(token_id).encode()

    def special_token(self, text: str) -> int | None:
        """See Text."""
        return None

    def stream(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        echo: bool = False,
        marks: Sequence[str] = (),
    ) -> TextStream:
        """See Text."""
        return self

    def push(self, token_id: int) -> str:
        """See TextStream."""
        return ""

    def flush(self) -> str:
        """See TextStream."""
        return ""


class HashText(_PlainText):
    """The hash model's text: bytes for ids below 256, `<id>` for the others."""

    longest_token: int | None = 1
    chat = ChatTemplate(_HASH_TEMPLATE)

    def encode(self, text: str, *, special_tokens: bool, limit: int | None = None) -> list[int]:
        """See Text; there are no special tokens."""
        data = text.encode()
        if limit is not None and len(data) > limit:
            raise TooManyTokensError(len(data))
        return list(data)

    def encode_input(self, text: str, second: str | None, limit: int, *, truncate: bool) -> tuple[list[int], int]:
        """See Text: the bytes of the texts."""
        first, other = text.encode(), (second or "").encode()
        if (excess := len(first) + len(other) - limit) > 0:
            if not truncate:
                raise TooManyTokensError(len(first) + len(other))
            # The longer one loses the difference first, then both the same.
            of_other = max(0, min(excess, (excess + len(other) - len(first)) // 2))
            first, other = first[: len(first) - excess + of_other], other[: len(other) - of_other]
        return [*first, *other], len(other)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, whole: bool = True) -> str:
        """See Text."""
        return "".join(self.push(token_id) for token_id in ids)

    def push(self, token_id: int) -> str:
        """See TextStream: one byte reads as its Latin-1 character, so that none waits for another."""
        return chr(token_id) if token_id < 256 else f"<{token_id}>"


class NoText(_PlainText):
    """The text of a model without a tokenizer: requests and answers are ids alone."""

    longest_token: int | None = None
    chat = ChatTemplate()

    def encode(self, text: str, *, special_tokens: bool, limit: int | None = None) -> list[int]:
        """See Text. Raises InvalidField."""
        raise InvalidField("prompt", "the model has no tokenizer.json; send token_ids")

    def encode_input(self, text: str, second: str | None, limit: int, *, truncate: bool) -> tuple[list[int], int]:
        """See Text. Raises InvalidField."""
        raise InvalidField("inputs", "the model has no tokenizer.json; send token_ids")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, whole: bool = True) -> str:
        """See Text."""
        return ""
