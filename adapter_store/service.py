"""AdapterService over gRPC: each method reads its request, asks the catalog in a thread, and answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc as pb_grpc

from adapter_store.bases import BaseModels
from adapter_store.catalog import Catalog
from adapter_store.certificates import FitnessCertificates
from adapter_store.convert import (
    adapter_to_pb,
    base_to_pb,
    certificate_to_pb,
    figures_from_pb,
    masked,
    refusals,
    revision_to_pb,
)
from adapter_store.deleted import DeletedRevisions
from adapter_store.grants import Grants
from adapter_store.lists import Lists
from adapter_store.metrics import StoreMetrics
from adapter_store.pages import decode_token, fill_page, page_size
from adapter_store.receive import Receiver
from adapter_store.records import NewRevision, Revision
from adapter_store.storage import DISK_FULL, PIECE_BYTES
from adapter_store.tenant_calls import TENANT_PIECE_BYTES
from adapter_store.tenants import check_owner, listed_tenants, own_adapter
from adapter_store.transfer import outgoing
from artifacts.digests import is_digest
from artifacts.names import (
    check_alias,
    parse_adapter_name,
    parse_reference,
    parse_revision_name,
)
from artifacts.revision import CONFIG_FILE
from rpc.errors import CallError, Exhausted, InvalidField, NotFound
from rpc.identity.principal import Role, caller, calling_tenant

if TYPE_CHECKING:
    from adapter_store.worker_grants import WorkerGrants

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
_NEWEST = 2**63 - 1


class AdapterService(pb_grpc.AdapterServiceServicer):
    """Methods of the store."""

    def __init__(
        self,
        catalog: Catalog,
        bases: BaseModels,
        receiver: Receiver,
        deleted: DeletedRevisions,
        certificates: FitnessCertificates,
        grants: Grants,
        metrics: StoreMetrics,
        worker_grants: WorkerGrants | None = None,
    ) -> None:
        self._metrics = metrics
        self._catalog = catalog
        self._lists = Lists(catalog)
        self._bases = bases
        self._receiver = receiver
        self._deleted = deleted
        self._certificates = certificates
        self._grants = grants
        self._worker_grants = worker_grants

    async def UploadRevision(
        self, request_iterator: AsyncIterator[pb.UploadRevisionRequest], context: Context
    ) -> pb.UploadRevisionResponse:
        """Keep a revision if all of it is valid, and move its alias."""
        revision = self._receiver.revision(request_iterator, calling_tenant())
        async with self._making_room(), revision as (new, upload):
            self._metrics.received.inc(sum(upload.sizes.values()))
            adapter, published, created = await asyncio.to_thread(self._catalog.publish, new, upload)
        self._metrics.published.inc(created)
        log.info("%s %s", "published" if created else "already there:", published.name)
        return pb.UploadRevisionResponse(
            adapter=adapter_to_pb(adapter), revision=self._revision(published), created=created
        )

    async def CertifyRevision(self, request: pb.CertifyRevisionRequest, context: Context) -> pb.CertifyRevisionResponse:
        """Keep a revision's certificate."""
        with refusals("name"):
            name = parse_revision_name(request.name)
        check_owner(name.adapter_name, calling_tenant())
        given = request.certificate
        figures = figures_from_pb(given)
        certificate = await asyncio.to_thread(
            self._certificates.keep, name, given.quantization, given.base_digest, figures
        )
        log.info("certified %s for %s", name, given.quantization)
        return pb.CertifyRevisionResponse(certificate=certificate_to_pb(certificate, self._certificates.policy))

    async def ValidateAdapter(
        self, request_iterator: AsyncIterator[pb.ValidateAdapterRequest], context: Context
    ) -> pb.ValidateAdapterResponse:
        """Check a revision as UploadRevision does, and keep nothing."""
        async with self._receiver.revision(request_iterator, calling_tenant()) as (new, _):
            return pb.ValidateAdapterResponse(revision=self._revision(new))

    async def DownloadRevision(
        self, request: pb.DownloadRevisionRequest, context: Context
    ) -> AsyncIterator[pb.DownloadRevisionResponse]:
        """Send a revision, then its files; DATA_LOSS before the last piece of a damaged file."""
        tenant = calling_tenant()
        with refusals("name"):
            name = parse_revision_name(request.name)
        # A worker fetches for a job that was admitted: the end of a grant does not end the answer.
        running = Role.WORKER in caller().roles
        if running and self._worker_grants is not None:
            self._worker_grants.check(context, tenant, request.name)
        if not await self._grants.may_use(name.adapter_name, tenant, running=running):
            raise NotFound("revision", request.name)
        piece_bytes = PIECE_BYTES if running else TENANT_PIECE_BYTES
        async with outgoing(self._catalog.open_revision, name, "revision", piece_bytes) as (revision, pieces):
            yield pb.DownloadRevisionResponse(revision=self._revision(revision))
            async for file, piece in pieces:
                if request.config_only and file != CONFIG_FILE:
                    break
                self._metrics.sent.inc(len(piece))
                yield pb.DownloadRevisionResponse(chunk=pb.FileChunk(name=file, data=piece))

    async def GetAdapter(self, request: pb.GetAdapterRequest, context: Context) -> pb.GetAdapterResponse:
        """Return the adapter and the revision that a name means now."""
        tenant = calling_tenant()
        with refusals("name"):
            reference = parse_reference(request.name, tenant)
        # The candidates of a short name are the tenant's own and the shared one.
        if not await self._grants.may_use(reference.candidates[0], tenant):
            raise NotFound("adapter", request.name)
        adapter, revision = await asyncio.to_thread(self._catalog.resolve, reference, request.name)
        return pb.GetAdapterResponse(adapter=adapter_to_pb(adapter), revision=self._revision(revision))

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        """Return a page of the adapters that the caller may use, in order of name."""
        tenant = calling_tenant()
        tenants, granted_to = listed_tenants(request.parent, tenant), "" if request.parent else tenant
        after = decode_token(request.page_token, first=("", ""))
        page, token = await self._lists.adapters(
            tenant, tenants, (after[0], after[1]), page_size(request.page_size), granted_to, adapter_to_pb
        )
        return pb.ListAdaptersResponse(adapters=page, next_page_token=token)

    async def DeleteAdapter(self, request: pb.DeleteAdapterRequest, context: Context) -> pb.DeleteAdapterResponse:
        """Delete an adapter with its revisions; their files can be downloaded by digest for a while, unless purged."""
        name = own_adapter("name", request.name, calling_tenant())
        async with self._making_room():
            await asyncio.to_thread(self._catalog.delete, name, request.etag, purge=request.purge)
        log.info("%s %s", "purged" if request.purge else "deleted", name)
        return pb.DeleteAdapterResponse()

    async def ListRevisions(self, request: pb.ListRevisionsRequest, context: Context) -> pb.ListRevisionsResponse:
        """Return a page of an adapter's revisions, newest first."""
        tenant = calling_tenant()
        with refusals("parent"):
            name = parse_adapter_name(request.parent, tenant)
        if not await self._grants.may_use(name, tenant):
            raise NotFound("adapter", str(name))
        before = decode_token(request.page_token, first=(_NEWEST,))[0]
        page, token = await self._lists.revisions(tenant, name, before, page_size(request.page_size), self._revision)
        return pb.ListRevisionsResponse(revisions=page, next_page_token=token)

    async def SetAlias(self, request: pb.SetAliasRequest, context: Context) -> pb.SetAliasResponse:
        """Move an alias to a revision, or remove it."""
        name = own_adapter("adapter", request.adapter, calling_tenant())
        with refusals("alias"):
            check_alias(request.alias)
        if request.digest and not is_digest(request.digest):
            raise InvalidField("digest", f"{request.digest!r} is not sha256: and 64 lower-case hexadecimal digits")
        adapter = await asyncio.to_thread(self._catalog.set_alias, name, request.alias, request.digest, request.etag)
        return pb.SetAliasResponse(adapter=adapter_to_pb(adapter))

    async def RegisterBaseModel(
        self, request_iterator: AsyncIterator[pb.RegisterBaseModelRequest], context: Context
    ) -> pb.RegisterBaseModelResponse:
        """Keep a base model's manifest and small files."""
        async with self._making_room(), self._receiver.base_model(request_iterator, caller().name) as (new, upload):
            self._metrics.received.inc(sum(upload.sizes.values()))
            base = await asyncio.to_thread(self._bases.register, new, upload)
        log.info("registered base model %s, %s", base.manifest.name, base.manifest.digest)
        return pb.RegisterBaseModelResponse(model=base_to_pb(base))

    async def GetBaseModel(self, request: pb.GetBaseModelRequest, context: Context) -> pb.GetBaseModelResponse:
        """Return the fields of a manifest that the mask names."""
        base = await asyncio.to_thread(self._bases.get, request.name)
        return pb.GetBaseModelResponse(model=masked(base_to_pb(base), request.read_mask))

    async def DownloadBaseModel(
        self, request: pb.DownloadBaseModelRequest, context: Context
    ) -> AsyncIterator[pb.DownloadBaseModelResponse]:
        """Send a manifest, then the small files; DATA_LOSS before the last piece of a damaged file."""
        async with outgoing(self._bases.open, request.name, "base model") as (base, pieces):
            yield pb.DownloadBaseModelResponse(model=base_to_pb(base))
            async for file, piece in pieces:
                self._metrics.sent.inc(len(piece))
                yield pb.DownloadBaseModelResponse(chunk=pb.FileChunk(name=file, data=piece))

    async def ListBaseModels(self, request: pb.ListBaseModelsRequest, context: Context) -> pb.ListBaseModelsResponse:
        """Return a page of the registered models, in order of name."""
        size = page_size(request.page_size)
        after = decode_token(request.page_token, first=("",))[0]
        found = await asyncio.to_thread(self._bases.list_bases, after, size + 1)
        page, token = fill_page(found, base_to_pb, lambda base: (base.manifest.name,), size)
        return pb.ListBaseModelsResponse(models=page, next_page_token=token)

    @asynccontextmanager
    async def _making_room(self) -> AsyncIterator[None]:
        """Give up the files of deleted adapters where the disk is full, so that the call can be repeated."""
        try:
            yield
        except Exhausted as error:
            if error.reason != DISK_FULL:
                raise
            with suppress(CallError):
                removed = await asyncio.to_thread(self._deleted.purge, everything=True)
                log.warning("the disk is full: removed %d revisions of deleted adapters", removed)
            raise

    def _revision(self, revision: Revision | NewRevision) -> pb.Revision:
        return revision_to_pb(revision, self._certificates.policy)
