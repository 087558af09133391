"""The blocking clients, of routers and of an adapter store. Their twins are in `aio`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Self, Unpack, overload

from loraplex.adapters.v1 import adapters_pb2, adapters_pb2_grpc
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex_client import adapters, calls, encoding
from loraplex_client.chat import ChatMessages
from loraplex_client.connection import Connection, GenerationStream
from loraplex_client.credentials import ApiKey, Tls, credentials_of
from loraplex_client.generation import Generation
from loraplex_client.options import ChatOptions, GenerateOptions, M, generate_request, parse_answer, with_keywords
from loraplex_client.resources import Adapter, BaseModel, FitnessCertificate, Pushed, Revision
from loraplex_client.retries import RESUME_ATTEMPTS, read_addresses


class StoreClient:
    """Adapters and base models at the adapter store's `address`, as `tenant`. Short names are the tenant's own.

    Every method raises LoraplexError. `timeout_s` is the deadline of each call; none by default. `api_key` is a key or
    a token, or a function that returns the current one; `tls` has the certificate files. Without them the variables
    LORAPLEX_API_KEY or LORAPLEX_API_KEY_FILE, LORAPLEX_CA, LORAPLEX_CERT and LORAPLEX_KEY are read. With a credential
    the tenant is the credential's, and `tenant` may stay empty; without one an empty `tenant` is `default`.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        tenant: str = "",
        *,
        timeout_s: float | None = None,
        api_key: ApiKey | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.address = ",".join(read_addresses(address))
        self._connection = Connection(
            address,
            adapters_pb2_grpc.AdapterServiceStub,
            tenant=tenant,
            timeout_s=timeout_s,
            credentials=credentials_of(api_key, tls),
        )
        self.tenant = self._connection.tenant

    def for_caller(self, tenant: str = "", api_key: ApiKey = "") -> Self:
        """Return a client for calls of another tenant or key, with the channels of this one, which closes them."""
        other = copy(self)
        other._connection = self._connection.for_caller(tenant, api_key)
        other.tenant = other._connection.tenant
        return other

    def push(
        self,
        directory: str | Path,
        name: str,
        *,
        base_model: str = "",
        alias: str = "",
        progress: adapters.Progress | None = None,
    ) -> Pushed:
        """Upload the peft adapter in `directory` as a revision of `name`, and move `alias` (`live`) to it.

        A `chat_template.jinja` in the directory becomes the adapter's own chat template; the prompts in a
        `certificate_prompts.jsonl` become those that its certificates are made with.
        `base_model` may be empty if the store has only one. Alias `-` moves no alias. `progress` is called with the
        bytes sent and the bytes in all.
        """
        header = adapters_pb2.UploadHeader(adapter=name, base_model=base_model, alias=alias)
        return self._connection.run(adapters.push(Path(directory), header, progress))

    def list(self, tenant: str = "") -> tuple[Adapter, ...]:
        """Return the adapters that the caller may use: its own and the shared ones, or those of one `tenant`."""
        return self._connection.run(adapters.list_adapters(f"tenants/{tenant}" if tenant else ""))

    def get(self, name: str) -> tuple[Adapter, Revision]:
        """Return an adapter, and the revision that `name` (with `@alias` or `@sha256:...`) currently means."""
        return self._connection.run(adapters.get_adapter(name))

    def delete(self, name: str, *, purge: bool = False) -> None:
        """Remove an adapter with all its revisions; with `purge` their files at once, even if answers run."""
        self._connection.run(adapters.delete_adapter(adapters.full_name(name, self.tenant), purge=purge))

    def revisions(self, name: str) -> tuple[Revision, ...]:
        """Return an adapter's revisions, newest first."""
        return self._connection.run(adapters.list_revisions(adapters.full_name(name, self.tenant)))

    def set_alias(self, name: str, alias: str, digest: str) -> Adapter:
        """Move `alias` to the revision of that digest, atomically; an empty digest removes it."""
        return self._connection.run(adapters.set_alias(adapters.full_name(name, self.tenant), alias, digest))

    def certify(self, revision: str, certificate: FitnessCertificate) -> FitnessCertificate:
        """Keep the certificate of a revision, by its full name; returns it with the store's verdict."""
        return self._connection.run(adapters.certify(revision, certificate))

    def download(self, name: str, directory: str | Path) -> Revision:
        """Write the two files of the revision that `name` means into `directory`."""
        return self._connection.run(adapters.download(name, Path(directory)))

    def register_model(self, model: BaseModel, files: Mapping[str, bytes], *, replace: bool = False) -> BaseModel:
        """Register a base model with its small files; `replace` allows another digest for an existing name."""
        return self._connection.run(adapters.register_model(model, files, replace))

    def models(self) -> tuple[BaseModel, ...]:
        """Return the registered base models."""
        return self._connection.run(adapters.list_models())

    def close(self) -> None:
        """Cancel running calls and free the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """Generates with a tenant's adapters at one or several routers. Threads may share it.

    `address` is `HOST:PORT`, several with commas between them, or a sequence. They are called in turn; an address that
    fails is left out for a while. A stream whose router is lost goes on at another, with every token once. It raises
    the last error after `resume_attempts` attempts in a row that no server answers (0: at the first loss), or after two
    minutes in which servers answer that it has to wait. `timeout_s` is the deadline of each call, none by default.
    `store` is the adapter store's address, for `.store`. `tenant`, `api_key` and `tls` are as StoreClient's.
    """

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
        self._connection = Connection(
            address,
            inference_pb2_grpc.InferenceServiceStub,
            tenant=tenant,
            timeout_s=timeout_s,
            resume_attempts=resume_attempts,
            credentials=credentials_of(api_key, tls),
        )
        self._store = None
        if store is not None:
            self._store = StoreClient(store, tenant, timeout_s=timeout_s, api_key=api_key, tls=tls)

    def for_caller(self, tenant: str = "", api_key: ApiKey = "") -> Self:
        """Return a client for calls of another tenant or key, with the channels of this one, which closes them."""
        other = copy(self)
        other._connection = self._connection.for_caller(tenant, api_key)
        other._store = None if self._store is None else self._store.for_caller(tenant, api_key)
        return other

    @property
    def store(self) -> StoreClient:
        """Return the store's client, as the same tenant. Raises ValueError if no store was given."""
        if self._store is None:
            raise ValueError("this client has no store; give Client(..., store='HOST:PORT')")
        return self._store

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

    @with_keywords(GenerateOptions)
    def generate_stream(
        self,
        prompt: str | None = None,
        *,
        response_format: Any = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerationStream:
        """Return an iterator of the answer's pieces; leaving it cancels the work. Raises LoraplexError."""
        request = generate_request(prompt, options, response_format)
        return self._connection.stream(request, timeout_s)

    @with_keywords(ChatOptions)
    def chat(
        self,
        messages: ChatMessages,
        *,
        response_format: Any = None,
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Generation:
        """Return the answer to a chat, whose `message` goes behind the others before the next turn.

        ChatOptions lists the keywords. An answer that calls tools has `tool_calls`; with a `response_format` another
        one has `parsed`. Raises LoraplexError.
        """
        with self.chat_stream(messages, response_format=response_format, timeout_s=timeout_s, **options) as stream:
            return parse_answer(stream.result(), response_format)

    @with_keywords(ChatOptions)
    def chat_stream(
        self,
        messages: ChatMessages,
        *,
        response_format: Any = None,
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> GenerationStream:
        """Return an iterator of the pieces of the answer to a chat; leaving it cancels the work."""
        return self.generate_stream(messages=messages, response_format=response_format, timeout_s=timeout_s, **options)

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: ChatMessages | None = None,
        model: str = "",
        adapter_id: str | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[int, ...]:
        """Return the ids that generating from this prompt or chat would feed to the model. Raises LoraplexError.

        A chat is rendered by the template of the adapter, where that has one.
        """
        return self._connection.run(calls.tokenize(prompt, messages, model, adapter_id, add_special_tokens))

    @with_keywords(GenerateOptions)
    def count_tokens(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> int:
        """Return the number of tokens of a prompt as `generate` with these keywords counts it. Raises LoraplexError."""
        return self._connection.run(calls.count_tokens(prompt, options))

    @with_keywords(GenerateOptions)
    def score(
        self, prompt: str | None, continuations: Sequence[str | Sequence[int]], **options: Unpack[GenerateOptions]
    ) -> calls.Scores:
        """Return the log probabilities of continuations, texts or ids, of a prompt. Raises LoraplexError.

        Of the keywords those that concern the prompt and the adapters may be given. A text is tokenized together with
        the prompt's: begin it with a space where one belongs between the two.
        """
        return self._connection.run(calls.score(prompt, continuations, options))

    @with_keywords(encoding.EncodeOptions)
    def embed(
        self,
        texts: Sequence[encoding.EncodeInput],
        *,
        pooling: encoding.Pooling | None = None,
        normalize: bool = True,
        timeout_s: float | None = None,
        **options: Unpack[encoding.EncodeOptions],
    ) -> encoding.Embeddings:
        """Return a vector of each text, scaled to length 1 unless `normalize` is False. Raises LoraplexError.

        A text may be a pair of texts, or a list of ids. `pooling` is the model's own by default. `timeout_s` is the
        deadline of each call of 64 texts.
        """
        return self._connection.run(encoding.embed(texts, pooling, normalize, options), timeout_s)

    @with_keywords(encoding.EncodeOptions)
    def classify(
        self,
        texts: Sequence[encoding.EncodeInput],
        *,
        timeout_s: float | None = None,
        **options: Unpack[encoding.EncodeOptions],
    ) -> encoding.Classifications:
        """Return the probabilities of the labels of a classifier for each text. Raises LoraplexError."""
        return self._connection.run(encoding.classify(texts, options), timeout_s)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """Return the text of these ids. Raises LoraplexError."""
        return self._connection.run(calls.detokenize(token_ids, model, skip_special_tokens))

    def token_bytes(self, token_ids: Sequence[int], *, model: str = "") -> tuple[bytes, ...]:
        """Return the bytes that each of these ids adds in the middle of a text. Raises LoraplexError."""
        return self._connection.run(calls.token_bytes(token_ids, model))

    def models(self) -> tuple[calls.ServedModel, ...]:
        """Return the base models that the router serves. Raises LoraplexError."""
        return self._connection.run(calls.models())

    def close(self) -> None:
        """Cancel running calls and free the connections."""
        self._connection.close()
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
