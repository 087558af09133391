"""Text of a model with a tokenizer.json, by the tokenizers library and the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from router.request import ChatMessage
from router.text.chat import ChatTemplate
from router.text.token_bytes import longest_token_bytes
from router.text.tokenizer import TextStream, TooManyTokensError
from rpc.errors import InvalidField

# Number of ids at the end of the prompt that the answer's first characters may depend on.
CONTEXT_IDS = 32
# Text of a character that is cut in the middle.
_CUT = "\N{REPLACEMENT CHARACTER}"


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
