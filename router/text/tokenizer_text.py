"""Text of a model with a tokenizer.json, by the tokenizers library and the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile

from tokenizers import Tokenizer

from router.text.chat import ChatTemplate
from router.text.detokenizer import Detokenizer
from router.text.panics import panics_as_errors
from router.text.special_tokens import SpecialTokens
from router.text.text import TextStream, TooManyTokensError
from router.text.token_bytes import longest_token_bytes


class TokenizerText:
    """The text of a model with a tokenizer.json."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        data = json.loads(files["tokenizer.json"])
        self.longest_token = longest_token_bytes(data)
        self._detokenizer = Detokenizer(self._tokenizer, data)
        self.chat = ChatTemplate.of_files(files)
        # Maximum ids of a truncating tokenizer, and that tokenizer; made when it is first needed.
        self._cut_to: tuple[int, Tokenizer] | None = None
        self._special = SpecialTokens(self._tokenizer, self.chat.tokens.get("bos_token", ""))

    def encode(self, text: str, *, special_tokens: bool, limit: int | None = None) -> list[int]:
        """See Text."""
        parts = self._special.parts(text)
        added = list(self._special.added) if special_tokens and len(parts) > 1 else []
        # Only the batch call releases the interpreter's lock; offsets are not needed.
        with panics_as_errors():
            encodings = self._tokenizer.encode_batch_fast(parts, add_special_tokens=special_tokens and not added)
        count = len(added) + sum(map(len, encodings))
        if limit is not None and count > limit:  # before the ids become objects
            raise TooManyTokensError(count)
        return added + [token_id for encoding in encodings for token_id in encoding.ids]

    def encode_input(self, text: str, second: str | None, limit: int, *, truncate: bool) -> tuple[list[int], int]:
        """See Text; as transformers does it, with the post-processor of tokenizer.json."""
        tokenizer = self._truncating(limit) if truncate else self._tokenizer
        with panics_as_errors():
            (encoding,) = tokenizer.encode_batch_fast([text if second is None else (text, second)])
        if len(encoding) > limit:
            raise TooManyTokensError(len(encoding))
        types = encoding.type_ids if second is not None else ()
        return encoding.ids, sum(1 for _ in takewhile(bool, reversed(types)))

    def _truncating(self, limit: int) -> Tokenizer:
        """Return a tokenizer that cuts texts to `limit` ids; the setting is one of the whole tokenizer."""
        if self._cut_to is None or self._cut_to[0] != limit:
            tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
            tokenizer.enable_truncation(limit, strategy="longest_first")
            self._cut_to = limit, tokenizer
        return self._cut_to[1]

    def shield(self, text: str) -> str:
        """See Text."""
        return self._special.shield(text)

    def cut(self, ids: Sequence[int], keep: int) -> Sequence[int]:
        """See Text."""
        return self._special.cut(ids, keep)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, whole: bool = True) -> str:
        """See Text."""
        return self._detokenizer.decode(ids, skip_special_tokens=skip_special_tokens, whole=whole)

    def bytes_of(self, token_id: int) -> bytes:
        """See Text."""
        return self._detokenizer.inner[token_id]

    def special_token(self, text: str) -> int | None:
        """See Text."""
        token_id = self._tokenizer.token_to_id(text)
        return token_id if token_id in self._detokenizer.special else None

    def stream(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        echo: bool = False,
        marks: Sequence[str] = (),
    ) -> TextStream:
        """See Text."""
        shown = frozenset(map(self.special_token, marks))
        skipped = self._detokenizer.special - shown if skip_special_tokens else frozenset[int]()
        return self._detokenizer.stream(prompt_ids, skipped=skipped, echo=echo)
