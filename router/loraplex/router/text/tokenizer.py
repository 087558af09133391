"""The tokenizers of base models: text to ids and back, by a tokenizer.json, as bytes for the hash model, or none.

Prompts are checked against the context before they are tokenized:

    prompt ──▶ more text than the context can hold? ──▶ short: tokenized here
                                                    └─▶ long: waits for its tenant's turn ──▶ a thread

A thread tokenizes some megabytes of text a second and takes up to 150 bytes of memory for each of its bytes, so that
their number bounds both. A short prompt waits for nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from loraplex.contracts.artifacts.activation import last_occurrence
from loraplex.contracts.artifacts.added_tokens import AddedToken
from loraplex.router.request import Chat, EncodeInput, EncodeRequest, PromptOptions, Request, TextPair
from loraplex.router.text.chat import ChatTemplate, TemplateRenderer, shielded_chat
from loraplex.runtime.rpc.errors import Internal, InvalidField
from loraplex.runtime.rpc.shares import FairThreads


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

    def with_tokens(self, tokens: tuple[AddedToken, ...]) -> ModelTokenizer:
        """Return this tokenizer with an adapter's added tokens. Raises Mismatch."""
        return self

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

    def added_token(self, text: str) -> int | None:
        """Return the id of the added token with this text, special or not; None where there is none."""
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


def bad_word_ids(tokenizer: ModelTokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words that an answer cannot have, in order and each once. Raises InvalidField.

    Of a word without spaces in front, and of the same with one, as it is in the middle of a text. vLLM leaves the
    second out where it has more ids than the first; in a byte-level vocabulary the word could then still come there.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, f" {bare}"):
            try:
                ids = tokenizer.tokenize(text, special_tokens=False)
            except InvalidField as error:
                raise InvalidField("sampling.bad_words", "the model has no tokenizer.json") from error
            if ids:  # not where the tokenizer drops all of the text
                found[tuple(ids)] = None
    return tuple(found)


def find_invocation(
    tokenizer: ModelTokenizer, invocation: tuple[int, ...], prompt_ids: tuple[int, ...], request: Request
) -> int | None:
    """Return where a prompt invokes an activated adapter; None: nowhere, and the base model may answer.

    Raises InvalidField. On many ids it may run in a thread.
    """
    at = last_occurrence(invocation, prompt_ids)
    if at is None and not request.allow_inactive:
        text, prompt = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (invocation, prompt_ids))
        what, advice = f"the adapter's invocation {text!r}, tokens {list(invocation)}", "add it"
        if text.strip() and text in prompt:
            what, advice = f"{what}, but its text in other ones", "separate it from its neighbours, send token_ids"
        message = f"does not have {what}; {advice}, or allow_inactive has the base model answer"
        raise InvalidField(request.prompt_field, message, reason="NOT_INVOKED")
    return at


T = TypeVar("T")

# Maximum length in characters of a text that is tokenized on the event loop, in about half a millisecond.
SHORT_CHARACTERS = 2_000
# Maximum number of ids whose text is made on the event loop, in a millisecond, or some ten where all are new.
SHORT_IDS = 1_000
# Maximum characters of a rendered chat where the model's longest token allows more: four times a message's bytes.
RENDERED_CHARACTERS = 1 << 24
# Number of threads for long prompts: half of the cores, since workers and Redis may share the machine.
THREADS = max(2, (os.cpu_count() or 1) // 2)


class PromptTokenizer:
    """Makes ids of the prompts of one router."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = FairThreads(threads, "tokenizer")
        self._renderer = TemplateRenderer()

    async def tokenize(
        self,
        tokenizer: ModelTokenizer,
        prompt: str | tuple[int, ...],
        field: str,
        tenant: str,
        context: int,
        options: PromptOptions = PromptOptions(),  # noqa: B008  # frozen
    ) -> tuple[int, ...]:
        """Return the ids of a prompt, at most `context`. Raises InvalidField, naming `field`."""
        if isinstance(prompt, str):
            shielded = tokenizer.shield(prompt) if options.parse_special_tokens is False else prompt
            return await self._tokenize(tokenizer, shielded, field, tenant, context, options, added=True)
        if options.truncate_to is not None:
            prompt = tuple(tokenizer.cut(prompt, options.truncate_to))
        if len(prompt) > context:
            raise context_exceeded(field, f"{len(prompt)} tokens", context, _CUT)
        return prompt

    async def tokenize_inputs(
        self, tokenizer: ModelTokenizer, request: EncodeRequest, limit: int
    ) -> list[tuple[tuple[int, ...], int]]:
        """Return the ids of each input, at most `limit`, and how many of them are a pair's second text.

        Raises InvalidField, naming the input.
        """
        inputs = list(zip(request.inputs, request.fields, strict=True))
        if not request.truncate:  # before anything of their size is made
            for entry, field in inputs:
                _check_input(tokenizer, entry, field, limit)

        def tokenize() -> list[tuple[tuple[int, ...], int]]:
            return [_ids_of(tokenizer, entry, field, limit, truncate=request.truncate) for entry, field in inputs]

        return (
            tokenize()
            if sum(map(_length, request.inputs)) <= SHORT_CHARACTERS
            else await self.in_turn(request.tenant, tokenize)
        )

    async def tokenize_chat(
        self,
        tokenizer: ModelTokenizer,
        template: ChatTemplate,
        chat: Chat,
        tenant: str,
        context: int,
        now: float,
        options: PromptOptions = PromptOptions(),  # noqa: B008  # frozen
    ) -> tuple[int, ...]:
        """Return the ids of a chat, at most `context`. `now` is the time that the template sees.

        Special tokens are the template's alone, unless the options say otherwise. Raises InvalidField or Unavailable.
        """
        limit = RENDERED_CHARACTERS if tokenizer.longest_token is None else context * tokenizer.longest_token
        if options.truncate_to is not None:
            limit = RENDERED_CHARACTERS
        limit = min(limit, RENDERED_CHARACTERS)
        shielded = chat if options.parse_special_tokens else shielded_chat(chat, tokenizer.shield)
        try:
            rendered = await self._renderer.render(template.call(shielded, now, limit), tenant)
        except InvalidField as error:
            if error.reason != CONTEXT_EXCEEDED:
                raise
            raise context_exceeded(error.field, f"more than {limit} characters of text", context) from None
        if not rendered:
            raise InvalidField("chat.messages", "the chat template makes no text of them", reason="CHAT_TEMPLATE")
        return await self._tokenize(tokenizer, rendered, "chat", tenant, context, options, added=False)

    async def _tokenize(
        self,
        tokenizer: ModelTokenizer,
        prompt: str,
        field: str,
        tenant: str,
        context: int,
        options: PromptOptions,
        *,
        added: bool,
    ) -> tuple[int, ...]:
        keep = options.truncate_to
        if keep is None:
            check_text(tokenizer, prompt, field, context)
        special = added if options.add_special_tokens is None else options.add_special_tokens

        def tokenize() -> tuple[int, ...]:
            ids = tokenizer.tokenize(prompt, special_tokens=special, limit=context if keep is None else None)
            return tuple(ids if keep is None else tokenizer.cut(ids, keep))

        try:
            return tokenize() if len(prompt) <= SHORT_CHARACTERS else await self.in_turn(tenant, tokenize)
        except Internal as error:  # the tokenizer's, which this prompt led to
            raise InvalidField(field, error.message, reason=error.reason) from None
        except TooManyTokensError as error:
            raise context_exceeded(field, f"{error.tokens} tokens", context, _CUT) from None

    async def run(self, tenant: str, ids: int, work: Callable[[], T]) -> T:
        """Return what a work on so many ids returns: on many it is done in a thread, at the tenant's turn."""
        return work() if ids <= SHORT_IDS else await self.in_turn(tenant, work)

    async def in_turn(self, tenant: str, work: Callable[[], T]) -> T:
        """Return what a work returns that is done in a thread, at the tenant's turn."""
        return await self._threads.run(tenant, work)

    def forget(self) -> int:
        """End the child processes, which keep templates; returns how many there were."""
        return self._renderer.children.forget()

    def close(self) -> None:
        """Take no more prompts; a thread that works ends by itself, a child process is ended."""
        self._threads.close()
        self._renderer.close()


def _length(entry: EncodeInput) -> int:
    """Return the characters of an input's texts, or the number of its ids."""
    return len(entry.first) + len(entry.second) if isinstance(entry, TextPair) else len(entry)


def _check_input(tokenizer: ModelTokenizer, entry: EncodeInput, field: str, limit: int) -> None:
    if isinstance(entry, tuple):
        if len(entry) > limit:
            raise context_exceeded(field, f"{len(entry)} tokens", limit, _TRUNCATE)
    elif size := _bytes_beyond(tokenizer, entry.first + entry.second if isinstance(entry, TextPair) else entry, limit):
        raise context_exceeded(field, f"{size} bytes of text", limit, _TRUNCATE)


def _ids_of(
    tokenizer: ModelTokenizer, entry: EncodeInput, field: str, limit: int, *, truncate: bool
) -> tuple[tuple[int, ...], int]:
    if isinstance(entry, tuple):
        return entry[:limit], 0
    first, second = (entry.first, entry.second) if isinstance(entry, TextPair) else (entry, None)
    try:
        ids, pair_tokens = tokenizer.tokenize_input(first, second, limit, truncate=truncate)
    except Internal as error:
        raise InvalidField(field, error.message, reason=error.reason) from None
    except TooManyTokensError as error:
        raise context_exceeded(field, f"{error.tokens} tokens", limit, _TRUNCATE) from None
    return tuple(ids), pair_tokens


def check_text(tokenizer: ModelTokenizer, prompt: str, field: str, context: int) -> None:
    """Raise InvalidField where a text has more bytes than `context` of the model's longest tokens stand for."""
    if size := _bytes_beyond(tokenizer, prompt, context):
        raise context_exceeded(field, f"{size} bytes of text", context, _CUT)


def _bytes_beyond(tokenizer: ModelTokenizer, prompt: str, context: int) -> int:
    """Return the size of a text in bytes if `context` tokens can't stand for them, else 0."""
    if tokenizer.longest_token is None:
        return 0
    limit = context * tokenizer.longest_token
    size = len(prompt)  # characters: no more than its bytes
    if size <= limit < 4 * size:
        size = len(prompt.encode())
    return size if size > limit else 0


# Reason of the error of a prompt that is too long for the model.
CONTEXT_EXCEEDED = "CONTEXT_EXCEEDED"
# Advice for prompts, and for texts of encoders.
_CUT = "prompt_options.truncate_to cuts a prompt from the left"
_TRUNCATE = "set truncate to have longer texts cut"


def context_exceeded(field: str, size: str, context: int, advice: str = "") -> InvalidField:
    """Return the error of a prompt of this size, in the words of OpenAI's that client libraries look for."""
    message = f"This model's maximum context length is {context} tokens; {size} do not fit"
    return InvalidField(field, f"{message}; {advice}" if advice else message, reason=CONTEXT_EXCEEDED)
