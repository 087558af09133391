"""The clients of routers and of an adapter store, blocking and on asyncio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar, Unpack, cast, overload

from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc

from loraplex_client.adapters import StoreCalls
from loraplex_client.calls import Call, Script
from loraplex_client.chat import ChatMessages, chat_of
from loraplex_client.connection import AsyncGenerationStream, AsyncioClient, BlockingClient, GenerationStream, method
from loraplex_client.decisions import Decisions, Question, decisions_of
from loraplex_client.encoding import EncodingCalls
from loraplex_client.endpoint import ApiKey, Tls, credentials_of
from loraplex_client.errors import InvalidRequestError, NotImplementedByServerError, rate_limits_in
from loraplex_client.generation import ContinuationScore, Generation, Scores, ServedModel, Usage
from loraplex_client.options import ChatOptions, GenerateOptions, M, generate_request, parse_answer, with_keywords
from loraplex_client.reranking import RerankingCalls
from loraplex_client.retries import RESUME_ATTEMPTS, read_addresses


class StoreClient(BlockingClient, StoreCalls):
    __doc__ = StoreCalls.__doc__


class AsyncStoreClient(AsyncioClient, StoreCalls):
    """StoreClient on the running event loop."""


Store = TypeVar("Store", StoreClient, AsyncStoreClient)
Stream = TypeVar("Stream", GenerationStream, AsyncGenerationStream)


class RouterCalls(EncodingCalls, RerankingCalls, Generic[Store, Stream]):
    """Generates with a tenant's adapters at one or several routers. Threads may share it.

    `address` is `HOST:PORT`, several with commas between them, or a sequence. They are called in turn; an address that
    fails is left out for a while. A stream whose router is lost goes on at another, with every token once. It raises
    the last error after `resume_attempts` attempts in a row that no server answers (0: at the first loss), or after two
    minutes in which servers answer that it has to wait. `timeout_s` is the deadline of each call, none by default.
    `store` is the adapter store's address, for `.store`. `tenant`, `api_key` and `tls` are as StoreClient's.
    """

    _connect: Any
    _store_client: type[Store]

    def __init__(
        self,
        address: str | Sequence[str],
        tenant: str = "",
        *,
        timeout_s: float | None = None,
        store: str | None = None,
        resume_attempts: int = RESUME_ATTEMPTS,
        api_key: ApiKey | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.address = ",".join(read_addresses(address))
        self._connection = self._connect(
            address,
            inference_pb2_grpc.InferenceServiceStub,
            tenant=tenant,
            timeout_s=timeout_s,
            resume_attempts=resume_attempts,
            credentials=credentials_of(api_key, tls),
        )
        self._store: Store | None = None
        if store is not None:
            self._store = self._store_client(store, tenant, timeout_s=timeout_s, api_key=api_key, tls=tls)

    def for_caller(self, tenant: str = "", api_key: ApiKey = "", *, batch_key: str | None = None) -> Self:
        """Return a client for calls of another tenant or key, with the channels of this one, which closes them.

        `batch_key` is for runners of batches: the id of the API key that made the batch, empty for none.
        """
        other = copy(self)
        other._connection = self._connection.for_caller(tenant, api_key, batch_key)
        other._store = None if self._store is None else self._store.for_caller(tenant, api_key)
        return other

    @property
    def store(self) -> Store:
        """Return the store's client, as the same tenant. Raises ValueError if no store was given."""
        if self._store is None:
            raise ValueError(f"this client has no store; give {type(self).__name__}(..., store='HOST:PORT')")
        return self._store

    @with_keywords(GenerateOptions)
    def generate_stream(
        self,
        prompt: str | None = None,
        *,
        response_format: Any = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Return an iterator of the answer's pieces; leaving it cancels the work. Raises LoraplexError."""
        stream: Stream = self._connection.stream(generate_request(prompt, options, response_format), timeout_s)
        return stream

    @method
    @with_keywords(ChatOptions)
    def chat(
        self,
        messages: ChatMessages,
        *,
        response_format: Any = None,
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Script[Generation]:
        """Return the answer to a chat, messages or one text, whose `message` goes behind the others for the next turn.

        ChatOptions lists the keywords. An answer that calls tools has `tool_calls`; with a `response_format` another
        one has `parsed`. Raises LoraplexError.
        """
        request = generate_request(None, cast(GenerateOptions, {**options, "messages": messages}), response_format)
        answer = yield Call("Generate", request, timeout_s=timeout_s)
        return parse_answer(answer, response_format)

    @with_keywords(ChatOptions)
    def chat_stream(
        self,
        messages: ChatMessages,
        *,
        response_format: Any = None,
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream:
        """Return an iterator of the pieces of the answer to a chat; leaving it cancels the work."""
        return self.generate_stream(messages=messages, response_format=response_format, timeout_s=timeout_s, **options)

    @method
    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: ChatMessages | None = None,
        model: str = "",
        adapter_id: str | None = None,
        add_special_tokens: bool | None = None,
        chat_options: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Script[tuple[int, ...]]:
        """Return the ids that generating from this prompt or chat would feed to the model. Raises LoraplexError.

        A chat is rendered by the template of the adapter, where that has one, with `chat_options`: keywords of
        ChatOptions from `tools` to `template_args`.
        """
        if (prompt is None) == (messages is None):
            raise InvalidRequestError("prompt: give exactly one of prompt and messages", field="prompt")
        request = inference_pb2.TokenizeRequest(model=model, adapter=adapter_id or "")
        if add_special_tokens is not None:
            request.prompt_options.add_special_tokens = add_special_tokens
        if prompt is not None:
            request.prompt = prompt
        else:
            request.chat.CopyFrom(chat_of(messages or (), chat_options))
        response = yield Call("Tokenize", request, timeout_s=timeout_s)
        return tuple(response.token_ids)

    @method
    @with_keywords(GenerateOptions)
    def count_tokens(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Script[int]:
        """Return the number of tokens of a prompt as `generate` with these keywords counts it. Raises LoraplexError."""
        request = inference_pb2.CountTokensRequest(spec=generate_request(prompt, options).spec)
        response = yield Call("CountTokens", request, timeout_s=timeout_s)
        return int(response.prompt_tokens)

    @method
    @with_keywords(GenerateOptions)
    def score(
        self,
        prompt: str | None,
        continuations: Sequence[str | Sequence[int]],
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Script[Scores]:
        """Return the log probabilities of continuations, texts or ids, of a prompt. Raises LoraplexError.

        Of the keywords those that concern the prompt and the adapters may be given. A text is tokenized together with
        the prompt's: begin it with a space where one belongs between the two.
        """
        if isinstance(continuations, str):
            raise InvalidRequestError("continuations: give a list, of texts or of ids", field="continuations")
        request = inference_pb2.ScoreRequest(
            spec=generate_request(prompt, options).spec, continuations=map(_continuation, continuations)
        )
        told: list[Any] = []
        response = yield Call("Score", request, timeout_s=timeout_s, hear=told.extend)
        return Scores(
            scores=tuple(
                ContinuationScore(tuple(one.token_ids), tuple(one.logprobs), one.sum, tuple(one.greedy))
                for one in response.scores
            ),
            usage=Usage(response.usage.prompt_tokens, response.usage.cached_tokens, response.usage.completion_tokens),
            adapter_revision=response.adapter_revision,
            request_id=response.request_id,
            adapters=tuple((part.adapter, part.weight) for part in response.adapters),
            rate_limits=rate_limits_in(told),
        )

    @method
    @with_keywords(GenerateOptions)
    def decide(
        self,
        prompt: str | None,
        questions: Sequence[Question],
        *,
        calibrated: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Script[Decisions]:
        """Return the probabilities of the answers to questions about a prompt, or about `messages`.

        Nothing is generated, and the questions share the computation of the input. `calibrated`: at the temperature of
        the adapter's calibration. Of the keywords those that concern the input and the adapters may be given. Raises
        LoraplexError.
        """
        request = inference_pb2.DecideRequest(
            calibrated=calibrated,
            spec=generate_request(prompt, options).spec,
            questions=[question.message(index) for index, question in enumerate(questions)],
        )
        told: list[Any] = []
        response = yield Call("Decide", request, timeout_s=timeout_s, hear=told.extend)
        return replace(decisions_of(response, questions), rate_limits=rate_limits_in(told))

    @method
    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> Script[str]:
        """Return the text of these ids. Raises LoraplexError."""
        request = inference_pb2.DetokenizeRequest(model=model, token_ids=_ids(token_ids).ids)
        request.skip_special_tokens = skip_special_tokens
        response = yield Call("Detokenize", request, timeout_s=timeout_s)
        return str(response.text)

    @method
    def token_bytes(
        self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None
    ) -> Script[tuple[bytes, ...]]:
        """Return the bytes that each of these ids adds in the middle of a text. Raises LoraplexError."""
        request = inference_pb2.DetokenizeRequest(model=model, token_ids=_ids(token_ids).ids, token_bytes=True)
        response = yield Call("Detokenize", request, timeout_s=timeout_s)
        if len(response.token_bytes) != len(token_ids):
            raise NotImplementedByServerError("token_bytes: this router is too old", field="token_bytes")
        return tuple(response.token_bytes)

    @method
    def identity(self, *, timeout_s: float | None = None) -> Script[tuple[str, str]]:
        """Return the tenant that the router takes the caller for, and who it is of that. Raises LoraplexError.

        A credential that is rotated has the same. Both are empty from an older router.
        """
        response = yield Call("ListModels", inference_pb2.ListModelsRequest(), timeout_s=timeout_s)
        return str(response.tenant), str(response.caller)

    @method
    def models(
        self, *, timeout_s: float | None = None, tokenizer_config: bool = False
    ) -> Script[tuple[ServedModel, ...]]:
        """Return the base models that the router serves. Raises LoraplexError."""
        request = inference_pb2.ListModelsRequest(tokenizer_config=tokenizer_config)
        response = yield Call("ListModels", request, timeout_s=timeout_s)
        return tuple(
            ServedModel(
                *(model.name, model.digest, model.context_length, tuple(model.tasks), tuple(model.labels)),
                *(model.max_rank, model.tokenizer_config),
            )
            for model in response.models
        )


def _continuation(value: str | Sequence[int]) -> inference_pb2.Continuation:
    if isinstance(value, str):
        return inference_pb2.Continuation(text=value)
    return inference_pb2.Continuation(token_ids=_ids(value, "continuations"))


def _ids(ids: Sequence[int], field: str = "token_ids") -> inference_pb2.TokenIds:
    try:
        return inference_pb2.TokenIds(ids=ids)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{field}: {error}", field=field) from error


class Client(BlockingClient, RouterCalls[StoreClient, GenerationStream]):
    __doc__ = RouterCalls.__doc__
    _store_client = StoreClient

    @overload
    def generate(
        self,
        prompt: str | None = None,
        *,
        response_format: type[M],
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> M: ...

    @overload
    def generate(
        self,
        prompt: str | None = None,
        *,
        response_format: Mapping[str, Any] | str,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any: ...

    @overload
    def generate(
        self,
        prompt: str | None = None,
        *,
        response_format: None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation: ...

    @with_keywords(GenerateOptions)
    def generate(
        self,
        prompt: str | None = None,
        *,
        response_format: Any = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """Return the whole answer; GenerateOptions lists the keywords. Raises LoraplexError.

        With a `response_format` it returns the answer as an object: of a pydantic model, or as its JSON says.
        """
        with self.generate_stream(prompt, response_format=response_format, timeout_s=timeout_s, **options) as stream:
            answer = parse_answer(stream.result(), response_format)
        return answer if response_format is None else answer.parsed

    def close(self) -> None:
        """Cancel running calls and free the connections; later calls raise ClientClosedError."""
        super().close()
        if self._store is not None:
            self._store.close()


class AsyncClient(AsyncioClient, RouterCalls[AsyncStoreClient, AsyncGenerationStream]):
    """Client on the running event loop."""

    _store_client = AsyncStoreClient

    @overload
    async def generate(
        self,
        prompt: str | None = None,
        *,
        response_format: type[M],
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> M: ...

    @overload
    async def generate(
        self,
        prompt: str | None = None,
        *,
        response_format: Mapping[str, Any] | str,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any: ...

    @overload
    async def generate(
        self,
        prompt: str | None = None,
        *,
        response_format: None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation: ...

    @with_keywords(GenerateOptions)
    async def generate(
        self,
        prompt: str | None = None,
        *,
        response_format: Any = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """Return the whole answer, as Client.generate does."""
        async with self.generate_stream(
            prompt, response_format=response_format, timeout_s=timeout_s, **options
        ) as stream:
            answer = parse_answer(await stream.result(), response_format)
        return answer if response_format is None else answer.parsed

    async def close(self) -> None:
        """Cancel running calls and free the connections; later calls raise ClientClosedError."""
        await super().close()
        if self._store is not None:
            await self._store.close()
