"""Calls without a transport: a script yields calls and is sent their answers, so sync and async run the same one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from loraplex.inference.v1 import inference_pb2

from loraplex_client.errors import InvalidRequestError
from loraplex_client.options import ChatMessages, chat_of

R = TypeVar("R")


class Upload(Iterator[Any]):
    """The requests of a client stream, made as they are sent. Keeps what broke them, which gRPC does not tell."""

    def __init__(self, requests: Iterator[Any]) -> None:
        self._requests = requests
        self.failure: Exception | None = None

    def __next__(self) -> Any:
        """The next request."""
        try:
            return next(self._requests)
        except StopIteration:
            raise
        except Exception as error:
            self.failure = error
            raise


@dataclass(frozen=True)
class Call:
    """An RPC. `request` is a message, or an Upload; `take` gets each message of an answer that is a stream."""

    method: str
    request: Any
    take: Callable[[Any], None] | None = None

    @property
    def failure(self) -> Exception | None:
        """Return the error that our side raised while sending the request, if any."""
        return self.request.failure if isinstance(self.request, Upload) else None

    @property
    def may_repeat(self) -> bool:
        """Return whether the call can be repeated: an upload's requests are used up, a stream's messages delivered."""
        return not isinstance(self.request, Upload) and self.take is None


Script: TypeAlias = Generator[Call, Any, R]


@dataclass(frozen=True)
class ServedModel:
    """A base model that the router serves; `context_length` counts tokens of prompt and answer together."""

    name: str
    digest: str
    context_length: int


def tokenize(prompt: str | None, messages: ChatMessages | None, model: str) -> Script[tuple[int, ...]]:
    """The ids that generating from this prompt, or chat, would feed the model."""
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("prompt: give exactly one of prompt and messages", field="prompt")
    request = inference_pb2.TokenizeRequest(model=model)
    if prompt is not None:
        request.prompt = prompt
    else:
        request.chat.CopyFrom(chat_of(messages or ()))
    response = yield Call("Tokenize", request)
    return tuple(response.token_ids)


def detokenize(token_ids: Sequence[int], model: str, skip_special_tokens: bool) -> Script[str]:
    """The text of these ids."""
    response = yield Call(
        "Detokenize",
        inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens),
    )
    return str(response.text)


def models() -> Script[tuple[ServedModel, ...]]:
    """The base models that the router serves."""
    response = yield Call("ListModels", inference_pb2.ListModelsRequest())
    return tuple(ServedModel(model.name, model.digest, model.context_length) for model in response.models)
