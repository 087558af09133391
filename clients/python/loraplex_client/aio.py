"""The asyncio clients: the methods of `loraplex_client.client`, awaited. Their docstrings are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Self, Unpack, overload

from loraplex.adapters.v1 import adapters_pb2, adapters_pb2_grpc
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex_client import adapters, calls, encoding
from loraplex_client.chat import ChatMessages
from loraplex_client.connection import AsyncConnection, AsyncGenerationStream
from loraplex_client.credentials import ApiKey, Tls, credentials_of
from loraplex_client.generation import Generation
from loraplex_client.options import ChatOptions, GenerateOptions, M, generate_request, parse_answer, with_keywords
from loraplex_client.resources import Adapter, BaseModel, FitnessCertificate, Pushed, Revision
from loraplex_client.retries import RESUME_ATTEMPTS, read_addresses


class AsyncStoreClient:
    """StoreClient on the running event loop."""

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
        self._connection = AsyncConnection(
            address,
            adapters_pb2_grpc.AdapterServiceStub,
            tenant=tenant,
            timeout_s=timeout_s,
            credentials=credentials_of(api_key, tls),
        )
        self.tenant = self._connection.tenant

    def for_caller(self, tenant: str = "", api_key: ApiKey = "") -> Self:
        other = copy(self)
        other._connection = self._connection.for_caller(tenant, api_key)
        other.tenant = other._connection.tenant
        return other

    async def push(
        self,
        directory: str | Path,
        name: str,
        *,
        base_model: str = "",
        alias: str = "",
        progress: adapters.Progress | None = None,
    ) -> Pushed:
        header = adapters_pb2.UploadHeader(adapter=name, base_model=base_model, alias=alias)
        return await self._connection.run(adapters.push(Path(directory), header, progress))

    async def list(self, tenant: str = "") -> tuple[Adapter, ...]:
        return await self._connection.run(adapters.list_adapters(f"tenants/{tenant}" if tenant else ""))

    async def get(self, name: str) -> tuple[Adapter, Revision]:
        return await self._connection.run(adapters.get_adapter(name))

    async def delete(self, name: str, *, purge: bool = False) -> None:
        await self._connection.run(adapters.delete_adapter(adapters.full_name(name, self.tenant), purge=purge))

    async def revisions(self, name: str) -> tuple[Revision, ...]:
        return await self._connection.run(adapters.list_revisions(adapters.full_name(name, self.tenant)))

    async def set_alias(self, name: str, alias: str, digest: str) -> Adapter:
        return await self._connection.run(adapters.set_alias(adapters.full_name(name, self.tenant), alias, digest))

    async def certify(self, revision: str, certificate: FitnessCertificate) -> FitnessCertificate:
        return await self._connection.run(adapters.certify(revision, certificate))

    async def download(self, name: str, directory: str | Path) -> Revision:
        return await self._connection.run(adapters.download(name, Path(directory)))

    async def register_model(self, model: BaseModel, files: Mapping[str, bytes], *, replace: bool = False) -> BaseModel:
        return await self._connection.run(adapters.register_model(model, files, replace))

    async def models(self) -> tuple[BaseModel, ...]:
        return await self._connection.run(adapters.list_models())

    async def close(self) -> None:
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncClient:
    """Client on the running event loop."""

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
        self._connection = AsyncConnection(
            address,
            inference_pb2_grpc.InferenceServiceStub,
            tenant=tenant,
            timeout_s=timeout_s,
            resume_attempts=resume_attempts,
            credentials=credentials_of(api_key, tls),
        )
        self._store = None
        if store is not None:
            self._store = AsyncStoreClient(store, tenant, timeout_s=timeout_s, api_key=api_key, tls=tls)

    def for_caller(self, tenant: str = "", api_key: ApiKey = "") -> Self:
        other = copy(self)
        other._connection = self._connection.for_caller(tenant, api_key)
        other._store = None if self._store is None else self._store.for_caller(tenant, api_key)
        return other

    @property
    def store(self) -> AsyncStoreClient:
        if self._store is None:
            raise ValueError("this client has no store; give AsyncClient(..., store='HOST:PORT')")
        return self._store

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
        async with self.generate_stream(
            prompt, response_format=response_format, timeout_s=timeout_s, **options
        ) as stream:
            answer = parse_answer(await stream.result(), response_format)
        return answer if response_format is None else answer.parsed

    @with_keywords(GenerateOptions)
    def generate_stream(
        self,
        prompt: str | None = None,
        *,
        response_format: Any = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerationStream:
        request = generate_request(prompt, options, response_format)
        return self._connection.stream(request, timeout_s)

    @with_keywords(ChatOptions)
    async def chat(
        self,
        messages: ChatMessages,
        *,
        response_format: Any = None,
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Generation:
        async with self.chat_stream(
            messages, response_format=response_format, timeout_s=timeout_s, **options
        ) as stream:
            return parse_answer(await stream.result(), response_format)

    @with_keywords(ChatOptions)
    def chat_stream(
        self,
        messages: ChatMessages,
        *,
        response_format: Any = None,
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerationStream:
        return self.generate_stream(messages=messages, response_format=response_format, timeout_s=timeout_s, **options)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: ChatMessages | None = None,
        model: str = "",
        adapter_id: str | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[int, ...]:
        return await self._connection.run(calls.tokenize(prompt, messages, model, adapter_id, add_special_tokens))

    @with_keywords(GenerateOptions)
    async def count_tokens(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> int:
        return await self._connection.run(calls.count_tokens(prompt, options))

    @with_keywords(GenerateOptions)
    async def score(
        self, prompt: str | None, continuations: Sequence[str | Sequence[int]], **options: Unpack[GenerateOptions]
    ) -> calls.Scores:
        return await self._connection.run(calls.score(prompt, continuations, options))

    @with_keywords(encoding.EncodeOptions)
    async def embed(
        self,
        texts: Sequence[encoding.EncodeInput],
        *,
        pooling: encoding.Pooling | None = None,
        normalize: bool = True,
        timeout_s: float | None = None,
        **options: Unpack[encoding.EncodeOptions],
    ) -> encoding.Embeddings:
        return await self._connection.run(encoding.embed(texts, pooling, normalize, options), timeout_s)

    @with_keywords(encoding.EncodeOptions)
    async def classify(
        self,
        texts: Sequence[encoding.EncodeInput],
        *,
        timeout_s: float | None = None,
        **options: Unpack[encoding.EncodeOptions],
    ) -> encoding.Classifications:
        return await self._connection.run(encoding.classify(texts, options), timeout_s)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        return await self._connection.run(calls.detokenize(token_ids, model, skip_special_tokens))

    async def token_bytes(self, token_ids: Sequence[int], *, model: str = "") -> tuple[bytes, ...]:
        return await self._connection.run(calls.token_bytes(token_ids, model))

    async def models(self) -> tuple[calls.ServedModel, ...]:
        return await self._connection.run(calls.models())

    async def close(self) -> None:
        await self._connection.close()
        if self._store is not None:
            await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
