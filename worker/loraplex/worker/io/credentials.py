"""A worker's credentials: of its links to routers, and for what routers have sealed in Redis."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from loraplex.contracts.broker.job_keys import JobKeys
from loraplex.contracts.broker.messages import SealError, SealKind
from loraplex.contracts.broker.seals import Seals
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.tenancy.auditor import RefusedCallers
from loraplex.runtime.tenancy.certificates import below, own_name
from loraplex.runtime.tenancy.signatures import Signature, SignatureError, Verifier, welcome_parts
from loraplex.worker.io.metrics import WorkerMetrics
from loraplex.worker.io.relay import NotARouterError

_NONCE_BYTES = 32


class LinkCredentials:
    """The worker's side of loraplex.router.dispatch.relay. Raises ValueError where the certificate is no worker's.

    gRPC has checked that the server's certificate is of an authority of --tls-ca and names the address that was
    dialled. A worker's certificate could pass as well: so the welcome has to prove the role.
    """

    def __init__(self, tls: TlsFiles) -> None:
        self.tls = tls
        self.name = own_name(tls, Role.WORKER)
        self._routers = Verifier(tls, Role.ROUTER)

    def named(self, name: str) -> str:
        """Return a worker's or incarnation's name as routers take it from this certificate."""
        return below(self.name, name)

    @staticmethod
    def new_nonce() -> bytes:
        """Return the nonce of a hello."""
        return secrets.token_bytes(_NONCE_BYTES)

    def check(self, nonce: bytes, response: pb.ConnectResponse) -> None:
        """Check the answer to a hello with this nonce. Raises NotARouterError."""
        proof = response.welcome.proof
        signature = Signature(tuple(proof.certificates), proof.signature)
        self._routers.look()
        try:
            self._routers.verify(signature, *welcome_parts(nonce, self.name))
        except SignatureError as error:
            raise NotARouterError(str(error)) from error


@dataclass(frozen=True)
class WorkerCredentials:
    """The credentials of one worker."""

    link: LinkCredentials
    seals: Seals


def credentials_of(tls: TlsFiles, job_key: str, metrics: WorkerMetrics, audit: RefusedCallers) -> WorkerCredentials:
    """Return a worker's credentials, which count and record what they refuse. Raises ValueError for unusable files."""

    def refused(kind: SealKind, error: SealError) -> None:
        metrics.seals_refused.labels(kind.value, error.reason).inc()
        audit.note("", "redis:", error.reason, method=f"redis/{kind.value}", message=str(error))

    seals = Seals(JobKeys(Path(job_key)), Verifier(tls, Role.ROUTER))
    seals.on_refused = refused
    return WorkerCredentials(LinkCredentials(tls), seals)
