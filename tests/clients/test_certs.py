"""`loraplex certs`: an authority for development, more certificates of it, and their renewal."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from loraplex.cli.__main__ import app
from loraplex.cli.terminal import CommandError
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.tenancy.certificates import principal_of


def certs(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["certs", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def certificate(directory: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((directory / f"{name}.pem").read_bytes())


def hosts(directory: Path, name: str) -> list[str]:
    names = certificate(directory, name).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName)


def test_more_certificates_are_issued_and_renewed_in_time(tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    certs("dev", str(directory), "--tenant", "acme", "--days", "400")
    certs("issue", str(directory), "router", "router-2", "--host", "router-2.internal", "--days", "10")
    certs("issue", str(directory), "tenant", "globex", "--days", "10")
    certs("issue", str(directory), "valkey", "valkey-1", "--host", "redis.internal")
    assert hosts(directory, "router-router-2") == ["localhost", "router-2.internal"]
    assert hosts(directory, "tenant-globex") == []
    principal = principal_of((directory / "tenant-globex.pem").read_bytes())
    assert principal is not None
    assert (principal.tenant, list(principal.roles)) == ("globex", [Role.TENANT_USER])
    names = [path.stem for path in directory.glob("*.pem") if not path.stem.endswith("-key")]
    ends = {name: certificate(directory, name).not_valid_after_utc for name in names}

    listed = certs("renew", str(directory), "--within", "30").splitlines()
    renewed = {line.split()[0] for line in listed if line.endswith("renewed")}
    assert renewed == {"router-router-2", "tenant-globex"}
    assert {line.split()[0] for line in listed[1:]} == ends.keys() - {"ca"}
    for name, end in ends.items():
        assert (certificate(directory, name).not_valid_after_utc > end) == (name in renewed), name
    again = json.loads(certs("renew", str(directory), "--json"))
    assert {one["name"]: one["renewed"] for one in again} == dict.fromkeys(ends.keys() - {"ca"}, False)
    assert hosts(directory, "router-router-2") == ["localhost", "router-2.internal"]
    assert certificate(directory, "router-router-2").not_valid_after_utc > datetime.now(UTC) + timedelta(days=360)
    key = directory / "router-router-2-key.pem"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    TlsFiles(directory / "router-router-2.pem", key, directory / "ca.pem")  # certificate and key go together


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("issue", "DIR", "king", "acme"), "KIND: king is not one of store, router,"),
        (("issue", "DIR", "tenant", "shared"), "NAME shared: not a tenant's name"),
        (("issue", "DIR", "worker", "a/b"), "NAME a/b: at most 51 letters"),
        (("issue", "DIR", "operator", "ann", "--host", "x"), "--host: a certificate of kind operator is no server's"),
        (("issue", "DIR", "tenant-admin", "acme"), "exists already; `loraplex certs renew`"),
        (("issue", "NONE", "router", "r2"), "no authority of `loraplex certs dev`"),
        (("renew", "NONE"), "no authority of `loraplex certs dev`"),
        (("dev", "DIR"), "ca.pem exists already"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    directory = tmp_path / "certs"
    certs("dev", str(directory))
    certs("issue", str(directory), "tenant-admin", "acme")
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    words = {"DIR": str(directory), "NONE": str(tmp_path / "none")}
    with pytest.raises(CommandError, match=message):
        certs(*(words.get(word, word) for word in arguments))
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
