"""AdapterService over gRPC: each method reads its request, asks the catalog in a thread, and answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc as pb_grpc

from loraplex.adapter_store.bases import BaseModels
from loraplex.adapter_store.catalog import Catalog
from loraplex.adapter_store.convert import (
    adapter_to_pb,
    base_to_pb,
    candidate_to_pb,
    certified_to_pb,
    check_digest,
    check_owner,
    decode_token,
    fill_page,
    found_to_pb,
    list_page,
    listed_tenants,
    masked,
    own_adapter,
    page_size,
    refusals,
    revision_to_pb,
    statement_from_pb,
)
from loraplex.adapter_store.grants import Grants
from loraplex.adapter_store.metrics import StoreMetrics
from loraplex.adapter_store.open_calls import TENANT_PIECE_BYTES
from loraplex.adapter_store.receive import Receiver
from loraplex.adapter_store.records import FitnessPolicy, NewRevision, Revision
from loraplex.adapter_store.storage import DISK_FULL, PIECE_BYTES, BlobReader, CorruptBlob, Upload
from loraplex.contracts.artifacts.names import (
    check_alias,
    parse_adapter_name,
    parse_reference,
    parse_revision_name,
)
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.runtime.rpc.errors import CallError, DataLoss, Exhausted, InvalidField, NotFound, PermissionDenied
from loraplex.runtime.rpc.interceptors import Context
from loraplex.runtime.rpc.principal import WORKER_GRANT_KEY, Role, caller, calling_tenant
from loraplex.runtime.rpc.shares import FairTurns
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.tenancy.guard import Refused

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
N = TypeVar("N")
R = TypeVar("R")
_DOWNLOAD = "/loraplex.adapters.v1.AdapterService/DownloadRevision"
_NEWEST = 2**63 - 1
# Maximum number of digests whose names a call asks for.
_MOST_DIGESTS = 1000


class Lists:
    """Reads pages of the catalog, each in a thread, in turns of the tenants.

    A page may have thousands of aliases and certificates, and the catalog is read by one thread at a time.
    """

    def __init__(self) -> None:
        self._turns = FairTurns(1)

    async def page(
        self,
        tenant: str,
        records: Callable[[], Generator[R, None, None]],
        convert: Callable[[R], M],
        key: Callable[[R], Sequence[str | int]],
        size: int,
    ) -> tuple[list[M], str]:
        """Return a page of the records, and the next page's token."""

        def fill() -> tuple[list[M], str]:
            with closing(records()) as rows:  # in this thread, which holds the catalog's lock
                return fill_page(rows, convert, key, size)

        return await self._turns.run(tenant, lambda: asyncio.ensure_future(asyncio.to_thread(fill)))


class WorkerGrants:
    """Checks the grants of routers that an authority of `tls` has signed; `refused` is told of every refusal."""

    def __init__(self, tls: TlsFiles, refused: Refused) -> None:
        # Imported late: a store without TLS starts without the library of signatures.
        from loraplex.runtime.tenancy.signatures import RevisionGrantVerifier, SignatureError, Verifier

        self._grants = RevisionGrantVerifier(Verifier(tls, Role.ROUTER))
        self._does_not_hold = SignatureError
        self._refused = refused

    def check(self, context: Context, tenant: str, revision: str) -> None:
        """Raise PermissionDenied unless a router has granted the calling worker's download."""
        shown = [value for key, value in context.invocation_metadata() or () if key == WORKER_GRANT_KEY]
        try:
            if len(shown) != 1 or not isinstance(shown[0], bytes):
                raise PermissionDenied("a worker needs a router's grant for the revision", "GRANT_MISSING")
            try:
                self._grants.check(shown[0], tenant, revision)
            except self._does_not_hold as error:
                raise PermissionDenied(f"the router's grant does not hold: {error}", "GRANT_INVALID") from error
        except PermissionDenied as refusal:
            self._refused(_DOWNLOAD, caller(), refusal, context.peer())
            raise


class TransferCalls(Protocol):
    """Imports and exports, which are at the edge: loraplex.transfers. Both raise errors of a call."""

    def imported(
        self, request: pb.ImportRevisionRequest, tenant: str
    ) -> AsyncGenerator[pb.TransferProgress | tuple[NewRevision, Upload], None]:
        """Yield the progress of an import, and last the revision with its files, which are then to be kept."""

    def exported(
        self, destination: str, tenant: str, opened: Callable[[], tuple[Revision, Mapping[str, BlobReader]]]
    ) -> AsyncGenerator[pb.TransferProgress | tuple[Revision, str], None]:
        """Push a revision, whose files `opened` opens; yields the progress, and last the revision and its pin."""


class AdapterService(pb_grpc.AdapterServiceServicer):
    """Methods of the store."""

    def __init__(
        self,
        catalog: Catalog,
        bases: BaseModels,
        receiver: Receiver,
        fitness: FitnessPolicy,
        grants: Grants,
        metrics: StoreMetrics,
        transfers: TransferCalls,
        worker_grants: WorkerGrants | None = None,
    ) -> None:
        self._metrics = metrics
        self._catalog = catalog
        self._lists = Lists()
        self._bases = bases
        self._receiver = receiver
        self._fitness = fitness
        self._grants = grants
        self._transfers = transfers
        self._worker_grants = worker_grants

    async def UploadRevision(
        self, request_iterator: AsyncIterator[pb.UploadRevisionRequest], context: Context
    ) -> pb.UploadRevisionResponse:
        """Keep a revision if all of it is valid, and move its alias."""
        revision = self._receiver.revision(request_iterator, calling_tenant())
        async with self._making_room(), revision as (new, upload):
            return pb.UploadRevisionResponse(**await self._publish(new, upload, "published"))

    async def _publish(self, new: NewRevision, upload: Upload, done: str, origin: str = "") -> dict[str, Any]:
        """Keep a revision, and move its alias; return the fields of the answer."""
        self._metrics.received.inc(sum(upload.sizes.values()))
        adapter, published, created = await asyncio.to_thread(self._catalog.publish, new, upload)
        self._metrics.published.inc(created)
        log.info("%s %s%s", done if created else "already there:", published.name, origin)
        revision = self._revision(published)
        fields = {"adapter": adapter_to_pb(adapter), "revision": revision}
        return {**fields, "created": created, "warnings": new.warnings}

    async def ImportRevision(
        self, request: pb.ImportRevisionRequest, context: Context
    ) -> AsyncIterator[pb.ImportRevisionResponse]:
        """Fetch a revision from a source, keep it if all of it is valid, and move its alias."""
        coming = self._transfers.imported(request, calling_tenant())
        async with self._making_room(), aclosing(coming):
            async for event in coming:
                if isinstance(event, pb.TransferProgress):
                    yield pb.ImportRevisionResponse(progress=event)
                    continue
                fields = await self._publish(*event, "imported", f" from {request.source}")
                yield pb.ImportRevisionResponse(imported=pb.ImportedRevision(**fields))

    async def ExportRevision(
        self, request: pb.ExportRevisionRequest, context: Context
    ) -> AsyncIterator[pb.ExportRevisionResponse]:
        """Push a revision to a registry."""
        tenant = calling_tenant()
        with refusals("name"):
            reference = parse_reference(request.name, tenant)
        if not await self._grants.may_use(reference.candidates[0], tenant):
            raise NotFound("adapter", request.name)
        _, revision, _ = await asyncio.to_thread(self._catalog.resolve, reference, request.name)
        going = self._transfers.exported(
            request.destination, tenant, partial(self._catalog.open_revision, revision.name)
        )
        async with aclosing(going):
            async for event in going:
                if isinstance(event, pb.TransferProgress):
                    yield pb.ExportRevisionResponse(progress=event)
                    continue
                pushed, pin = event
                log.info("exported %s to %s", pushed.name, pin)
                exported = pb.ExportedRevision(revision=self._revision(pushed), pin=pin)
                yield pb.ExportRevisionResponse(exported=exported)

    async def CertifyRevision(self, request: pb.CertifyRevisionRequest, context: Context) -> pb.CertifyRevisionResponse:
        """Keep a revision's certificate or calibration."""
        with refusals("name"):
            name = parse_revision_name(request.name)
        check_owner(name.adapter_name, calling_tenant())
        statement = statement_from_pb(request)
        await asyncio.to_thread(self._catalog.certify, name, statement)
        log.info("certified %s for %s", name, statement.quantization or "its base as it is")
        return certified_to_pb(statement, self._fitness)

    async def ValidateAdapter(
        self, request_iterator: AsyncIterator[pb.ValidateAdapterRequest], context: Context
    ) -> pb.ValidateAdapterResponse:
        """Check a revision as UploadRevision does, and keep nothing."""
        async with self._receiver.revision(request_iterator, calling_tenant()) as (new, _):
            return pb.ValidateAdapterResponse(revision=self._revision(new.revision))

    async def DownloadRevision(
        self, request: pb.DownloadRevisionRequest, context: Context
    ) -> AsyncIterator[pb.DownloadRevisionResponse]:
        """Send a revision, then its files; DATA_LOSS before the last piece of a damaged file."""
        if running := Role.WORKER in caller().roles:
            await context.send_initial_metadata(())  # which it waits for, to tell a slow store from one that hangs
        tenant = calling_tenant()
        with refusals("name"):
            name = parse_revision_name(request.name)
        # A worker fetches for a job that was admitted: the end of a grant does not end the answer.
        if running and self._worker_grants is not None:
            self._worker_grants.check(context, tenant, request.name)
        if not await self._grants.may_use(name.adapter_name, tenant, running=running):
            raise NotFound("revision", request.name)
        piece_bytes = PIECE_BYTES if running else TENANT_PIECE_BYTES
        async with _outgoing(self._catalog.open_revision, name, "revision", piece_bytes) as (revision, pieces):
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
        adapter, revision, candidate = await asyncio.to_thread(self._catalog.resolve, reference, request.name)
        epoch = self._catalog.changes.epoch
        answer = pb.GetAdapterResponse(adapter=adapter_to_pb(adapter), revision=self._revision(revision), epoch=epoch)
        if candidate is not None:
            answer.candidate.CopyFrom(candidate_to_pb(candidate, self._fitness))
            if Role.ROUTER in caller().roles:
                answer.candidate.split_key = candidate.split_key
        return answer

    async def ListAdapterChanges(
        self, request: pb.ListAdapterChangesRequest, context: Context
    ) -> pb.ListAdapterChangesResponse:
        """Return the names of the adapters that have changed since the last call."""
        epoch, latest, names = self._catalog.changes.since(request.epoch, request.after)
        return pb.ListAdapterChangesResponse(epoch=epoch, latest=latest, names=names)

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        """Return a page of the adapters that the caller may use, in order of name."""
        tenant = calling_tenant()
        tenants, granted_to = listed_tenants(request.parent, tenant), "" if request.parent else tenant
        after = decode_token(request.page_token, first=("", ""))
        size = page_size(request.page_size)
        page, token = await self._lists.page(
            tenant,
            lambda: self._catalog.adapters(tenants, (after[0], after[1]), size + 1, granted_to),
            adapter_to_pb,
            lambda adapter: (adapter.name.tenant, adapter.name.adapter),
            size,
        )
        if request.usable:
            allows = partial(self._catalog.quotas.plans.allows_adapter, tenant, caller().key_id)
            page = [one for one in page if allows(parse_adapter_name(one.name, tenant))]
        return pb.ListAdaptersResponse(adapters=page, next_page_token=token)

    async def DeleteAdapter(self, request: pb.DeleteAdapterRequest, context: Context) -> pb.DeleteAdapterResponse:
        """Delete an adapter with its revisions; their files can be downloaded by digest for a while, unless purged."""
        name = own_adapter("name", request.name, calling_tenant())
        delete = partial(self._catalog.delete, name, request.etag, purge=request.purge)
        try:
            await asyncio.to_thread(delete)
        except Exhausted as error:
            if error.reason != DISK_FULL:
                raise
            # Otherwise nobody could free a full disk. The store takes the reserve again when there is room.
            if not await asyncio.to_thread(self._catalog.deleted.data.give_reserve):
                raise
            await asyncio.to_thread(delete)
            await asyncio.to_thread(self._catalog.deleted.purge, everything=True)
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
        size = page_size(request.page_size)
        page, token = await self._lists.page(
            tenant,
            lambda: self._catalog.revisions(name, before, size + 1),
            self._revision,
            lambda revision: (revision.order,),
            size,
        )
        return pb.ListRevisionsResponse(revisions=page, next_page_token=token)

    async def FindRevisions(self, request: pb.FindRevisionsRequest, context: Context) -> pb.FindRevisionsResponse:
        """Return the names of all tenants' revisions that have these digests."""
        if len(request.digests) > _MOST_DIGESTS:
            raise InvalidField("digests", f"{len(request.digests)} digests; at most {_MOST_DIGESTS} in a call")
        for digest in request.digests:
            check_digest("digests", digest)
        found = await asyncio.to_thread(self._catalog.find, list(request.digests))
        return pb.FindRevisionsResponse(revisions=map(found_to_pb, found))

    async def SetAlias(self, request: pb.SetAliasRequest, context: Context) -> pb.SetAliasResponse:
        """Move an alias to a revision, or remove it."""
        name = own_adapter("adapter", request.adapter, calling_tenant())
        with refusals("alias"):
            check_alias(request.alias)
        if request.digest:
            check_digest("digest", request.digest)
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
        async with _outgoing(self._bases.open, request.name, "base model") as (base, pieces):
            yield pb.DownloadBaseModelResponse(model=base_to_pb(base))
            async for file, piece in pieces:
                self._metrics.sent.inc(len(piece))
                yield pb.DownloadBaseModelResponse(chunk=pb.FileChunk(name=file, data=piece))

    async def ListBaseModels(self, request: pb.ListBaseModelsRequest, context: Context) -> pb.ListBaseModelsResponse:
        """Return a page of the registered models, in order of name."""
        read = partial(self._bases.list_bases, all_revisions=request.all_revisions)
        page, token = await list_page(request, read, base_to_pb, BaseModels.position)
        return pb.ListBaseModelsResponse(models=page, next_page_token=token)

    async def PromoteBaseModel(
        self, request: pb.PromoteBaseModelRequest, context: Context
    ) -> pb.PromoteBaseModelResponse:
        """Make a revision of a base model the live one."""
        base = await asyncio.to_thread(self._bases.promote, request.name, request.digest)
        log.info("promoted base model %s, %s", request.name, request.digest)
        return pb.PromoteBaseModelResponse(model=base_to_pb(base))

    @asynccontextmanager
    async def _making_room(self) -> AsyncIterator[None]:
        """Give up the files of deleted adapters where the disk is full, so that the call can be repeated."""
        try:
            yield
        except Exhausted as error:
            if error.reason != DISK_FULL:
                raise
            with suppress(CallError):
                removed = await asyncio.to_thread(self._catalog.deleted.purge, everything=True)
                log.warning("the disk is full: removed %d revisions of deleted adapters", removed)
            raise

    def _revision(self, revision: Revision) -> pb.Revision:
        return revision_to_pb(revision, self._fitness)


@asynccontextmanager
async def _outgoing(
    open_files: Callable[[N], tuple[R, Mapping[str, BlobReader]]], name: N, kind: str, piece_bytes: int = PIECE_BYTES
) -> AsyncIterator[tuple[R, AsyncIterator[tuple[str, bytes]]]]:
    """Open files with `open_files(name)`; yields the record, and (file, piece) of each file in turn. Closes the files.

    Raises DataLoss of the `kind` `name` when the files are damaged, before a damaged file's last piece.
    """
    readers: Mapping[str, BlobReader] = {}
    try:
        record, readers = await asyncio.to_thread(open_files, name)
        yield record, _pieces(readers, piece_bytes)
    except CorruptBlob as error:
        raise DataLoss(kind, str(name), str(error)) from error
    finally:
        for reader in readers.values():
            await asyncio.shield(asyncio.to_thread(reader.close))


async def _pieces(readers: Mapping[str, BlobReader], piece_bytes: int) -> AsyncIterator[tuple[str, bytes]]:
    for file, reader in readers.items():
        yield file, await asyncio.to_thread(reader.read, piece_bytes)  # one empty piece for an empty file
        while reader.remaining:
            yield file, await asyncio.to_thread(reader.read, piece_bytes)
