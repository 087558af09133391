"""Prompts of documents: the model's or the adapter's template, the ids of its answers, and documents that are cut.

A template with messages of the roles `query` and `document` is the reranker's own, as sentence-transformers and vLLM
write them; its message of the role `system` is the instruction. Any other chat template gets Qwen3-Reranker's words as
a system's and a user's message, and a model without a template gets them as Qwen3's template writes them.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.artifacts.base_model import LOGIT_SCORE
from loraplex.router.catalog.models import ServedModel
from loraplex.router.request import Chat, ChatMessage, TextPair
from loraplex.router.text.chat import ChatTemplate
from loraplex.router.text.tokenizer import CONTEXT_EXCEEDED, ModelTokenizer, PromptTokenizer, context_exceeded
from loraplex.runtime.rpc.errors import InvalidField, Mismatch

# Qwen3-Reranker's words, as its model card has them.
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3 = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n\n"  # Jinja drops a template's last newline
)
# Variables of a chat template: one that reasons would begin with a tag, not an answer.
_TEMPLATE_ARGS = '{"enable_thinking": false}'
# Most renderings of a document that is cut: the cut may change the tokens around it.
_TRIES = 4


@dataclass(frozen=True, slots=True)
class Document:
    """A document with its query; `field` and `query_field` are their paths in the request."""

    query: str
    text: str
    field: str
    query_field: str


def has_roles(template: ChatTemplate) -> bool:
    """Tell whether a template renders messages of a query and of a document."""
    return all(re.search(rf"""(['"]){role}\1""", template.source) for role in ("query", "document"))


def answer_ids(model: ServedModel, yes: str, no: str) -> tuple[int, int]:
    """Return the ids of the answers yes and no: of the caller, the model's files, or the words, in this order.

    Raises InvalidField, or Mismatch where the files have ids that are not served.
    """
    if bool(yes) != bool(no):
        raise InvalidField("no" if yes else "yes", "give both answers, or neither")
    name = model.manifest.name
    if not yes and LOGIT_SCORE in model.manifest.files:
        ids = _logit_score_ids(model.manifest.files[LOGIT_SCORE])
        if not all(type(one) is int and 0 <= one < model.manifest.vocab_size for one in ids):
            message = "has no true_token_id and false_token_id of its vocabulary; both are needed for a score"
            raise Mismatch(name, f"1_LogitScore/config.json {message}", reason="NO_RERANKER")
        return ids[0], ids[1]
    return _id_of(model, "yes", yes or "yes"), _id_of(model, "no", no or "no")


def _logit_score_ids(data: bytes) -> list[Any]:
    """Return what the module's file has as the ids of yes and no; None for one that it has not."""
    try:
        config = parse_object(data, LOGIT_SCORE)
    except ArtifactError:
        config = {}
    return [config.get(field) for field in ("true_token_id", "false_token_id")]


def _id_of(model: ServedModel, field: str, text: str) -> int:
    name = model.manifest.name
    try:
        ids = model.tokenizer.tokenize(text, special_tokens=False)
    except InvalidField as error:
        raise Mismatch(name, "has no tokenizer.json, so that it scores no documents", reason="NO_RERANKER") from error
    if len(ids) != 1:
        raise InvalidField(field, f"{text!r} is {len(ids)} tokens of {name}; name an answer of one token in {field}")
    return ids[0]


class Prompts:
    """Makes the prompts of one call, with at most `context` tokens. Raises InvalidField, or Unavailable."""

    def __init__(
        self, prompts: PromptTokenizer, model: ServedModel, tenant: str, context: int, instruction: str
    ) -> None:
        self._prompts, self._model, self._tenant = prompts, model, tenant
        self._context = context
        self._instruction = instruction
        self._template, self._own = model.template, has_roles(model.template)
        if not self._template.source:
            self._template = replace(self._template, source=_QWEN3)
        # All documents see the same time.
        self._now = time.time()

    @property
    def renders(self) -> bool:
        """Tell whether the template is a reranker's, so that a head gets its text in place of the pair."""
        return self._own

    async def cut(self, document: Document, tokens: int) -> Document:
        """Return a document with its first `tokens` tokens."""
        work = partial(_first_tokens, self._model.tokenizer, document.text, tokens)
        return replace(document, text=await self._prompts.run(self._tenant, len(document.text), work))

    async def ids(self, document: Document, *, room: int, truncate: bool) -> tuple[int, ...]:
        """Return the ids of a document's prompt, which leave `room` tokens of the context."""
        most = self._context - room
        if not truncate:
            return await self._checked(document, most)
        document = await self.cut(document, most)
        keep = await self._count(document.text)
        # All that the template adds to a document of the context's length may be beyond the context.
        limit = 2 * self._context + len(f"{document.query}{self._instruction}".encode())
        for _ in range(_TRIES):
            ids = await self._fitting(document, limit)
            if ids is not None and len(ids) <= most:
                return ids
            keep -= limit if ids is None else len(ids) - most
            if keep < 1:
                break
            document = await self.cut(document, keep)
        raise _too_long(document.query_field, "the query", self._context)

    async def _checked(self, document: Document, most: int) -> tuple[int, ...]:
        if (ids := await self._fitting(document, most)) is not None:
            return ids
        if await self._fitting(replace(document, text="."), most) is None:
            raise _too_long(document.query_field, "the query", self._context)
        raise _too_long(document.field, "the document and its query", self._context)

    async def _fitting(self, document: Document, limit: int) -> tuple[int, ...] | None:
        """Return the ids of a document's prompt; None where they are more than `limit`."""
        model, chat = self._model, self._chat(document)
        try:
            return await self._prompts.tokenize_chat(
                model.tokenizer, self._template, chat, self._tenant, limit, self._now
            )
        except InvalidField as error:
            if error.reason == CONTEXT_EXCEEDED:
                return None
            why = error.message.removeprefix(f"{error.field}: ")
            raise InvalidField("model", f"{model.manifest.name}: {why}", reason=error.reason) from error

    def _chat(self, document: Document) -> Chat:
        if self._own:
            instruction = (ChatMessage("system", self._instruction),) if self._instruction else ()
            pair = (ChatMessage("query", document.query), ChatMessage("document", document.text))
            return Chat((*instruction, *pair), template_args=_TEMPLATE_ARGS)
        instruction_text = self._instruction or INSTRUCTION
        asked = f"<Instruct>: {instruction_text}\n<Query>: {document.query}\n<Document>: {document.text}"
        messages = (ChatMessage("system", _JUDGE), ChatMessage("user", asked))
        return Chat(messages, template_args=_TEMPLATE_ARGS)

    async def _count(self, text: str) -> int:
        work = partial(_tokens, self._model.tokenizer, text)
        return len(await self._prompts.run(self._tenant, len(text), work))


def _too_long(field: str, what: str, context: int) -> InvalidField:
    return context_exceeded(field, f"{what}, with the template,", context, "set truncate to have documents cut")


def _tokens(tokenizer: ModelTokenizer, text: str) -> list[int]:
    return tokenizer.tokenize(tokenizer.shield(text), special_tokens=False)


def _first_tokens(tokenizer: ModelTokenizer, text: str, count: int) -> str:
    ids = _tokens(tokenizer, text)
    if len(ids) <= count:
        return text
    return tokenizer.decode(ids[:count], skip_special_tokens=False, whole=False)


def pair_of(document: Document) -> TextPair:
    """Return a document as the pair that a cross-encoder takes."""
    return TextPair(document.query, document.text)
