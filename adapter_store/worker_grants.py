"""Grants that workers show with a download: they may have what a router's grant names, and nothing else."""

from __future__ import annotations

from typing import Any

import grpc

from rpc.errors import PermissionDenied
from rpc.identity.guard import Refused
from rpc.identity.principal import WORKER_GRANT_KEY, Role, caller
from rpc.identity.revision_grants import RevisionGrantVerifier
from rpc.identity.signatures import SignatureError, Verifier
from rpc.identity.tls import TlsFiles

DOWNLOAD = "/loraplex.adapters.v1.AdapterService/DownloadRevision"


class WorkerGrants:
    """Checks the grants of routers that an authority of `tls` has signed; `refused` is told of every refusal."""

    def __init__(self, tls: TlsFiles, refused: Refused) -> None:
        self._grants = RevisionGrantVerifier(Verifier(tls, Role.ROUTER))
        self._refused = refused

    def check(self, context: grpc.aio.ServicerContext[Any, Any], tenant: str, revision: str) -> None:
        """Raise PermissionDenied unless a router has granted the calling worker's download."""
        given = [value for key, value in context.invocation_metadata() or () if key == WORKER_GRANT_KEY]
        try:
            if len(given) != 1 or not isinstance(given[0], bytes):
                raise PermissionDenied("a worker needs a router's grant for the revision", "GRANT_MISSING")
            try:
                self._grants.check(given[0], tenant, revision)
            except SignatureError as error:
                raise PermissionDenied(f"the router's grant does not hold: {error}", "GRANT_INVALID") from error
        except PermissionDenied as refusal:
            self._refused(DOWNLOAD, caller(), refusal, context.peer())
            raise
