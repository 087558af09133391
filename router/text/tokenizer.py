"""Text to ids and back for a base model: with its own tokenizer, as bytes for the hash model, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from router.request import ChatMessage
from router.text.chat import ChatTemplate
from router.text.token_bytes import longest_token_bytes
from rpc.errors import InvalidField

# Number of ids at the end of the prompt that the answer's first characters may depend on.
CONTEXT_IDS = 32
# Text of a character that is cut in the middle.
_CUT = "\N{REPLACEMENT CHARACTER}"


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

    def encode(self, text: str, *, special_tokens: bool, limit: int | None = None) -> list[int]:
        """Return the ids of a text; may take long. Raises TooManyTokensError beyond `limit` of them."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids."""

    def stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
        """Return a stream for the answer to a prompt."""

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Render a chat as the model's prompt. Raises InvalidField."""


def text_of(architecture: str, vocab_size: int, files: Mapping[str, bytes]) -> Text:
    """Make the Text of a base model from its manifest. Raises ValueError on a broken tokenizer."""
    if architecture == "hash":
        return HashText(vocab_size)
    if "tokenizer.json" not in files:
        return NoText()
    return TokenizerText(files)


class TokenizerText:
    """The text of a model with a tokenizer.json."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.longest_token = longest_token_bytes(files["tokenizer.json"])
        self._chat = ChatTemplate.of_files(files)

    def encode(self, text: str, *, special_tokens: bool, limit: int | None = None) -> list[int]:
        """See Text."""
        # Only the batch call releases the interpreter's lock; offsets are not needed.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
        if limit is not None and len(encoding) > limit:  # before the ids become objects
            raise TooManyTokensError(len(encoding))
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See Text."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
        """See Text."""
        return _TokenizerStream(self._tokenizer, list(prompt_ids[-CONTEXT_IDS:]), skip_special_tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """See Text."""
        if self._chat is None:
            raise InvalidField("chat", "the model has no chat template; send a prompt")
        return self._chat.render(messages)


class _TokenizerStream:
    def __init__(self, tokenizer: Tokenizer, context: list[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        if tokenizer.decode(context, skip_special_tokens=skip_special_tokens).endswith(_CUT):
            context = []  # the stream would hold it back, and then show it with the answer
        self._context = context
        self._skip = skip_special_tokens
        self._stream = DecodeStream(ids=context, skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._shown = 0
        self._waiting = False

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        piece = self._stream.step(self._tokenizer, token_id)
        self._waiting = piece is None
        if piece is None:
            return ""
        self._shown += len(piece)
        return str(piece)

    def flush(self) -> str:
        if not self._waiting:
            return ""
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skip)
        whole = self._tokenizer.decode(self._context + self._ids, skip_special_tokens=self._skip)
        return str(whole[len(before) + self._shown :])


class HashText:
    """The hash model's text: bytes for ids below 256, `<id>` for the others."""

    longest_token: int | None = 1

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str, *, special_tokens: bool, limit: int | None = None) -> list[int]:
        """See Text; there are no special tokens."""
        data = text.encode()
        if limit is not None and len(data) > limit:
            raise TooManyTokensError(len(data))
        return list(data)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See Text."""
        return "".join(self.push(token_id) for token_id in ids)

    def stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
        """See Text; the model has no state."""
        return self

    def push(self, token_id: int) -> str:
        """See TextStream: one byte reads as its Latin-1 character, so that none waits for another."""
        return chr(token_id) if token_id < 256 else f"<{token_id}>"

    def flush(self) -> str:
        """See TextStream."""
        return ""

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """See Text."""
        return "".join(f"{message.role}: {message.content}\n" for message in messages) + "assistant: "


class NoText:
    """The text of a model without a tokenizer: requests and answers are ids alone."""

    longest_token: int | None = None

    def encode(self, text: str, *, special_tokens: bool, limit: int | None = None) -> list[int]:
        """See Text. Raises InvalidField."""
        raise InvalidField("prompt", "the model has no tokenizer.json; send token_ids")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See Text."""
        return ""

    def stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
        """See Text."""
        return self

    def push(self, token_id: int) -> str:
        """See TextStream."""
        return ""

    def flush(self) -> str:
        """See TextStream."""
        return ""

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """See Text. Raises InvalidField."""
        raise InvalidField("chat", "the model has no tokenizer.json; send token_ids")
