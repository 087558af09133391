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
from loraplex.cli.development_ca import DevelopmentCa
from loraplex.cli.terminal import CommandError
from loraplex.contracts.broker.job_keys import JobKeys, new_job_key
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.tenancy.certificates import end_of, principal_of


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
    assert {line.split()[0] for line in listed[1:]} == ends.keys()
    for name, end in ends.items():
        assert (certificate(directory, name).not_valid_after_utc > end) == (name in renewed), name
    again = json.loads(certs("renew", str(directory), "--json"))
    assert {one["name"]: one["renewed"] for one in again} == dict.fromkeys(ends.keys(), False)
    assert hosts(directory, "router-router-2") == ["localhost", "router-2.internal"]
    assert certificate(directory, "router-router-2").not_valid_after_utc > datetime.now(UTC) + timedelta(days=360)
    key = directory / "router-router-2-key.pem"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    TlsFiles(directory / "router-router-2.pem", key, directory / "ca.pem")  # certificate and key go together


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    certs("dev", str(directory), "--days", "5")
    (directory / "store.pem").write_bytes(
        DevelopmentCa.read(directory).issue("loraplex://store/store", life=timedelta(1))[0]
    )
    end = certificate(directory, "ca").not_valid_after_utc
    listed = certs("renew", str(directory), "--within", "3").splitlines()
    assert [line.split()[0] for line in listed if line.endswith("renewed")] == ["store"]
    assert certificate(directory, "store").not_valid_after_utc == end
    assert listed[1].split()[:2] == ["ca", f"{end:%Y-%m-%d}"]
    assert certificate(directory, "router").not_valid_after_utc <= end


def test_a_new_authority_is_trusted_beside_the_one_before_until_that_ends(tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    certs("dev", str(directory), "--days", "5")
    old = certificate(directory, "ca")
    assert "copy ca.pem" in certs("renew", str(directory), "--ca", "--days", "100")
    new, kept = x509.load_pem_x509_certificates((directory / "ca.pem").read_bytes())
    assert kept == old
    certificate(directory, "router").verify_directly_issued_by(old)  # not renewed by now
    certs("renew", str(directory), "--within", "30")
    certificate(directory, "router").verify_directly_issued_by(new)
    tls = TlsFiles(*(directory / name for name in ("router.pem", "router-key.pem", "ca.pem")))
    assert end_of(tls.content.cert, tls.content.ca) == certificate(directory, "router").not_valid_after_utc.timestamp()
    assert end_of(tls.content.cert, tls.content.ca) > old.not_valid_after_utc.timestamp()


def test_a_process_tells_when_the_first_of_its_chain_ends(tmp_path: Path) -> None:
    ca, other = DevelopmentCa(timedelta(days=5)), DevelopmentCa(timedelta(days=1))
    ca.life_end += timedelta(days=90)  # as an authority that bounds nothing
    cert, _ = ca.issue("loraplex://router/router", life=timedelta(days=30))
    end = x509.load_pem_x509_certificate(ca.pem).not_valid_after_utc
    assert end_of(cert, other.pem + ca.pem) == end.timestamp()


def test_an_authority_that_has_ended_issues_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    certs("dev", str(directory), "--days", "5")
    ended = DevelopmentCa(timedelta(seconds=-1))
    ended.write_ca(directory)
    with pytest.raises(CommandError, match=r"the authority ended on .*; `loraplex certs renew DIR --ca`"):
        certs("issue", str(directory), "router", "r2")
    certs("renew", str(directory), "--ca")
    assert len(x509.load_pem_x509_certificates((directory / "ca.pem").read_bytes())) == 1


def test_a_job_key_is_replaced_in_three_steps_in_which_all_jobs_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "job.key"
    file.write_text("a " + new_job_key("a").split()[1])
    seen = [list(JobKeys(file).content)]
    for said in ("added a key", "encrypts", "removed key a"):
        assert said in certs("rotate-job-key", str(file))
        seen.append(list(JobKeys(file).content))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    new = seen[-1][0]
    assert seen == [["a"], ["a", new], [new, "a"], [new]]
    assert "added a key" in certs("rotate-job-key", str(file))
    file.write_text("nonsense")
    with pytest.raises(CommandError, match="write ID KEY"):
        certs("rotate-job-key", str(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("issue", "DIR", "king", "acme"), "KIND: king is not one of store, router,"),
        (("issue", "DIR", "tenant", "shared"), "NAME shared: not a tenant's name"),
        (("issue", "DIR", "worker", "a/b"), "NAME a/b: at most 51 letters"),
        (
            ("issue", "DIR", "operator", "ann", "--host", "x"),
            "--host: a certificate of kind operator is not for servers; leave it out",
        ),
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
