"""Files of credentials for tests: an authority, certificates of processes, and job keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loraplex.cli.development_ca import DevelopmentCa, write_private
from loraplex.contracts.broker.job_keys import JobKeys, new_job_key
from loraplex.contracts.broker.messages import SealError, SealKind
from loraplex.contracts.broker.seals import Seals
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.tenancy.signatures import Signer, Verifier

HOSTS = ["127.0.0.1", "localhost"]
CA = DevelopmentCa()


def tls_files(directory: Path, uri: str, ca: DevelopmentCa = CA, trusted: DevelopmentCa = CA) -> TlsFiles:
    """Return the files of a process with such a certificate, which trusts an authority."""
    return TlsFiles(*write_tls_files(directory, uri, ca, trusted))


def write_tls_files(
    directory: Path, uri: str, ca: DevelopmentCa = CA, trusted: DevelopmentCa = CA
) -> tuple[Path, Path, Path]:
    """Write certificate, key and trusted authority of a process; return the paths."""
    name = uri.partition("://")[2].replace("/", "-")
    (directory / f"ca-{name}").mkdir(exist_ok=True)
    return (*ca.write(directory, name, ca.issue(uri, HOSTS)), trusted.write_ca(directory / f"ca-{name}"))


def job_keys(directory: Path, name: str = "job.key") -> JobKeys:
    """Return the job keys of a file, which is made if it is missing."""
    if not (directory / name).exists():
        write_private(directory / name, new_job_key().encode())
    return JobKeys(directory / name)


class RefusedSeals:
    """A list of what was not opened."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def note(self, kind: SealKind, error: SealError) -> None:
        """Note a refusal."""
        self.reasons.append(error.reason)


def router_seals(directory: Path, now: Callable[[], float], name: str = "r", ca: DevelopmentCa = CA) -> Seals:
    """Return the seals of a router whose certificate an authority has signed."""
    tls = tls_files(directory, f"loraplex://router/{name}", ca)
    return Seals(job_keys(directory), Verifier(tls, Role.ROUTER), Signer(tls, Role.ROUTER), now=now)


def worker_seals(directory: Path, now: Callable[[], float]) -> tuple[Seals, RefusedSeals]:
    """Return the seals of a worker, and what they refuse."""
    seals, refused = Seals(job_keys(directory), _verifier(directory), now=now), RefusedSeals()
    seals.on_refused = refused.note
    return seals, refused


def _verifier(directory: Path) -> Verifier:
    return Verifier(tls_files(directory, "loraplex://worker/w"), Role.ROUTER)
