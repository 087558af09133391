"""The relay's credentials: workers come with certificates, and the router proves to them that it is one."""

from __future__ import annotations

import logging
import time

from loraplex.relay.v1 import relay_pb2 as pb

from rpc.errors import CallError, PermissionDenied, Unauthenticated
from rpc.identity.certificates import belongs
from rpc.identity.guard import Refused
from rpc.identity.principal import Principal, Role, caller
from rpc.identity.signatures import Signer, welcome_parts
from rpc.identity.tls import TlsFiles

log = logging.getLogger(__name__)

CONNECT = "/loraplex.relay.v1.RelayService/Connect"
# Minimum bytes of a hello's nonce.
NONCE_BYTES = 16


class RelayCredentials:
    """Checks workers' hellos against their certificates; `refused` is told of every refusal, as the guard's is."""

    def __init__(self, tls: TlsFiles, refused: Refused) -> None:
        self._signer = Signer(tls, Role.ROUTER)
        self._refused = refused

    def greet(self, hello: pb.Hello, peer: str) -> tuple[Principal, pb.RouterProof]:
        """Return who says hello, and the router's proof. Raises PermissionDenied where the hello names another one."""
        worker = caller()
        owner = worker.name.partition("/")[2]
        for named in (hello.worker_id, hello.incarnation):
            if not belongs(owner, named):
                error = PermissionDenied(f"{worker.name} says hello as {named}", reason="OTHER_WORKER")
                self.refuse(worker, error, peer)
                raise error
        if len(hello.nonce) < NONCE_BYTES:
            error = PermissionDenied("the hello has no nonce: the worker runs without credentials", "NONCE_MISSING")
            self.refuse(worker, error, peer)
            raise error
        signature = self._signer.sign(*welcome_parts(hello.nonce, owner))
        return worker, pb.RouterProof(certificates=signature.certificates, signature=signature.value)

    def has_expired(self, worker: Principal | None, peer: str) -> bool:
        """Tell, and report, whether the certificate has expired that a worker's stream began with."""
        if worker is None or worker.expires_at is None or time.time() < worker.expires_at:
            return False
        message = f"the certificate of {worker.name} has expired"
        self.refuse(worker, Unauthenticated(message, reason="CREDENTIAL_EXPIRED"), peer)
        return True

    def check_bound(self, worker: Principal | None, peer: str, job_id: str, incarnation: str) -> None:
        """Report a worker that sends something of a job which another worker's incarnation has."""
        if worker is not None and not belongs(worker.name.partition("/")[2], incarnation):
            message = f"{worker.name} sends something of job {job_id}, which {incarnation} has"
            self.refuse(worker, PermissionDenied(message, "OTHER_WORKERS_JOB"), peer)

    def refuse(self, worker: Principal, error: CallError, peer: str) -> None:
        """Report what a worker was not permitted."""
        log.warning("relay: %s", error.message)
        self._refused(CONNECT, worker, error, peer)
