"""A worker's credentials: of its links to routers, and for what routers have sealed in Redis."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from broker.job_keys import JobKeys
from broker.seal_kinds import SealError, SealKind
from broker.seals import Seals
from rpc.audit.refused_callers import RefusedCallers
from rpc.identity.principal import Role
from rpc.identity.signatures import Verifier
from rpc.identity.tls import TlsFiles
from worker.io.metrics import WorkerMetrics
from worker.io.relay.link_credentials import LinkCredentials

log = logging.getLogger(__name__)


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
