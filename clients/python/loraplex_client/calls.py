"""Calls without a transport: generators that yield calls and are sent the answers, shared by sync and async clients."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from loraplex.inference.v1 import inference_pb2

from loraplex_client.chat import ChatMessages, chat_of
from loraplex_client.errors import InvalidRequestError, NotImplementedByServerError
from loraplex_client.generation import Usage
from loraplex_client.options import GenerateOptions, generate_request

R = TypeVar("R")


class UploadRequests(Iterator[Any]):
    """The requests of a client stream, made while they are sent. Keeps their error, which gRPC does not report."""

    def __init__(self, requests: Iterator[Any]) -> None:
        self._requests = requests
        self.failure: Exception | None = None

    def __next__(self) -> Any:
        """Return the next request."""
        try:
            return next(self._requests)
        except StopIteration:
            raise
        except Exception as error:
            self.failure = error
            raise


@dataclass(frozen=True)
class Call:
    """An RPC. `request` is a message or UploadRequests; `take` is called with each message of a streamed answer."""

    method: str
    request: Any
    take: Callable[[Any], None] | None = None

    @property
    def failure(self) -> Exception | None:
        """Return the error that our side raised while sending the request, if any."""
        return self.request.failure if isinstance(self.request, UploadRequests) else None

    @property
    def may_repeat(self) -> bool:
        """Return whether the call can be repeated: not after an upload was sent or a stream's message delivered.

        A deletion is not repeated either: if the first was carried out, the second would end with NotFoundError. Nor is
        a method that makes a secret, which would be lost.
        """
        once = self.method.startswith(("Delete", "Create", "Rotate"))
        return not isinstance(self.request, UploadRequests) and self.take is None and not once


Script: TypeAlias = Generator[Call, Any, R]


def single(method: str, request: Any) -> Script[Any]:
    """Return the answer to one call."""
    return (yield Call(method, request))


def pages(method: str, request: Any, items: Callable[[Any], Iterable[Any]]) -> Script[list[Any]]:
    """Return the items of all pages of a list; `items` takes those of one page."""
    listed: list[Any] = []
    while True:
        page = yield Call(method, request)
        listed += items(page)
        if not page.next_page_token:
            return listed
        request.page_token = page.next_page_token


@dataclass(frozen=True)
class ServedModel:
    """A base model that the router serves; `context_length` counts tokens of prompt and answer together.

    `tasks` are those of generate, embed and classify that it does without an adapter, `labels` its own classifier's.
    """

    name: str
    digest: str
    context_length: int
    tasks: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()


def tokenize(
    prompt: str | None,
    messages: ChatMessages | None,
    model: str,
    adapter_id: str | None,
    add_special_tokens: bool | None,
) -> Script[tuple[int, ...]]:
    """Return the ids that generating from this prompt or chat would feed to the model."""
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("prompt: give exactly one of prompt and messages", field="prompt")
    request = inference_pb2.TokenizeRequest(model=model, adapter=adapter_id or "")
    if add_special_tokens is not None:
        request.prompt_options.add_special_tokens = add_special_tokens
    if prompt is not None:
        request.prompt = prompt
    else:
        request.chat.CopyFrom(chat_of(messages or ()))
    response = yield Call("Tokenize", request)
    return tuple(response.token_ids)


def detokenize(token_ids: Sequence[int], model: str, skip_special_tokens: bool) -> Script[str]:
    """Return the text of these ids."""
    response = yield Call(
        "Detokenize",
        inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens),
    )
    return str(response.text)


def token_bytes(token_ids: Sequence[int], model: str) -> Script[tuple[bytes, ...]]:
    """Return the bytes that each of these ids adds in the middle of a text. Raises NotImplementedByServerError."""
    request = inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids, token_bytes=True)
    response = yield Call("Detokenize", request)
    if len(response.token_bytes) != len(token_ids):
        raise NotImplementedByServerError("token_bytes: this router is too old", field="token_bytes")
    return tuple(response.token_bytes)


def models() -> Script[tuple[ServedModel, ...]]:
    """Return the base models that the router serves."""
    response = yield Call("ListModels", inference_pb2.ListModelsRequest())
    return tuple(
        ServedModel(model.name, model.digest, model.context_length, tuple(model.tasks), tuple(model.labels))
        for model in response.models
    )


@dataclass(frozen=True)
class ContinuationScore:
    """A continuation: its ids, the log probability of each, their sum, whether each is the likeliest at its place."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sum: float
    greedy: tuple[bool, ...]

    @property
    def is_greedy(self) -> bool:
        """Return whether the model's greedy answer begins with the continuation."""
        return all(self.greedy)


@dataclass(frozen=True)
class Scores:
    """The scores of a prompt's continuations, in their order; see Generation for the other fields."""

    scores: tuple[ContinuationScore, ...]
    usage: Usage
    adapter_revision: str
    request_id: str
    adapters: tuple[tuple[str, float], ...] = ()

    @property
    def best(self) -> int:
        """Return the number of the continuation with the highest sum."""
        return max(range(len(self.scores)), key=lambda index: self.scores[index].sum)


def count_tokens(prompt: str | None, options: GenerateOptions) -> Script[int]:
    """Return the number of tokens that generating from this prompt would feed to the model."""
    request = inference_pb2.CountTokensRequest(spec=generate_request(prompt, options).spec)
    response = yield Call("CountTokens", request)
    return int(response.prompt_tokens)


def score(prompt: str | None, continuations: Sequence[str | Sequence[int]], options: GenerateOptions) -> Script[Scores]:
    """Return the log probabilities of these continuations of a prompt."""
    if isinstance(continuations, str):
        raise InvalidRequestError("continuations: give a list, of texts or of ids", field="continuations")
    request = inference_pb2.ScoreRequest(
        spec=generate_request(prompt, options).spec, continuations=map(_continuation, continuations)
    )
    response = yield Call("Score", request)
    return Scores(
        scores=tuple(
            ContinuationScore(tuple(one.token_ids), tuple(one.logprobs), one.sum, tuple(one.greedy))
            for one in response.scores
        ),
        usage=Usage(response.usage.prompt_tokens, response.usage.cached_tokens, response.usage.completion_tokens),
        adapter_revision=response.adapter_revision,
        request_id=response.request_id,
        adapters=tuple((part.adapter, part.weight) for part in response.adapters),
    )


def _continuation(value: str | Sequence[int]) -> inference_pb2.Continuation:
    if isinstance(value, str):
        return inference_pb2.Continuation(text=value)
    try:
        return inference_pb2.Continuation(token_ids=inference_pb2.TokenIds(ids=value))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"continuations: {error}", field="continuations") from error
