"""The blocking client of an adapter store. Its twin is in `aio_store_client`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Self

from loraplex.adapters.v1 import adapters_pb2, adapters_pb2_grpc

from loraplex_client import adapters
from loraplex_client.addresses import read_addresses
from loraplex_client.connection import Connection
from loraplex_client.credentials import ApiKey, Tls, credentials_of
from loraplex_client.resources import Adapter, BaseModel, FitnessCertificate, Pushed, Revision


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
