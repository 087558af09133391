"""Signatures of adapters: bundles that model-signing 1.1.1 wrote (`signed/`), held against the operator's policy.

signed/adapter/model.sig was made with the private key of trainer.pub, signed/other.sig with another, and
signed/certificate.sig with a certificate of TRAINER below root.pem that ends in 2126: all over the files of
signed/adapter.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import releases_pb2, releases_pb2_grpc

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.contracts.artifacts.statements import sign_statement
from loraplex.releases.bundles import read_public_key, verify_files
from loraplex.releases.signers import SignersError, read_signers
from tests.adapter_store.conftest import metadata

if TYPE_CHECKING:
    from tests.adapter_store.conftest import Client

SIGNED = Path(__file__).parent / "signed"
BUNDLE = (SIGNED / "adapter/model.sig").read_bytes()
TRAINER = "https://ci.acme.example/trainer"
FILES = {name: (SIGNED / "adapter" / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}


@pytest.fixture
def store_settings(data: Path, tmp_path: Path) -> StoreSettings:
    for name in ("trainer.pub", "root.pem"):
        (tmp_path / name).write_bytes((SIGNED / name).read_bytes())
    (tmp_path / "signers.toml").write_text(
        f'[acme]\nkeys = ["trainer.pub"]\n[initech]\nroots = ["root.pem"]\nidentities = ["{TRAINER}"]\n'
    )
    return StoreSettings(data=data, port=0, signers=str(tmp_path / "signers.toml"), audit=str(tmp_path / "audit"))


@pytest.fixture
async def ready(client: Client, hash_base: BaseModel) -> Client:
    """A client of a store that takes any adapter."""
    await client.register(hash_base)
    return client


def changed(bundle: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a bundle with another statement under the same signature."""
    fields = json.loads(bundle)
    statement = json.loads(base64.b64decode(fields["dsseEnvelope"]["payload"]))
    change(statement)
    fields["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    return json.dumps(fields).encode()


async def test_a_release_has_its_signer_and_without_one_nothing_gets_an_alias(
    ready: Client, store: Store, tmp_path: Path
) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        stub: Any = releases_pb2_grpc.ReleaseServiceStub(channel)

        async def create(revision: str, signature: bytes, tenant: str = "acme") -> Any:
            request = releases_pb2.CreateReleaseRequest(revision=revision, signature=signature)
            return (await stub.CreateRelease(request, metadata=metadata(tenant))).release

        async def refused(call: Any, reason: str, text: str) -> None:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert text in (error.value.details() or "")
            assert reason.encode() in dict(error.value.trailing_metadata() or ())["grpc-status-details-bin"]

        await refused(ready.upload("support", FILES), "SIGNATURE_MISSING", "need a signature before an alias")
        signed = (await ready.upload("support", FILES, alias="-")).revision
        other = (await ready.upload("support", {**FILES, WEIGHTS_FILE: b"others"}, alias="-")).revision
        alias = pb.SetAliasRequest(adapter="support", alias="live", digest=signed.digest)
        await refused(ready.call("SetAlias", alias), "SIGNATURE_MISSING", "needs a signature before an alias")
        await refused(create(signed.name, b""), "SIGNATURE_MISSING", "sign the directory with model-signing")
        await refused(create(signed.name, b"{}"), "SIGNATURE_INVALID", "is not a bundle as model-signing writes it")
        by_other = (SIGNED / "other.sig").read_bytes()
        await refused(
            create(signed.name, by_other), "SIGNATURE_INVALID", "is not signed by a key that the store trusts"
        )
        forged = changed(BUNDLE, lambda statement: statement["predicate"]["resources"].clear())
        await refused(create(signed.name, forged), "SIGNATURE_INVALID", "is not signed by a key that the store trusts")
        await refused(create(other.name, BUNDLE), "SIGNATURE_INVALID", f"{WEIGHTS_FILE} is sha256:")
        listed = await stub.ListReleases(
            releases_pb2.ListReleasesRequest(parent="tenants/acme/adapters/support"), metadata=metadata("acme")
        )
        assert not listed.releases, "nothing is left of them"
        release = await create(signed.name, BUNDLE)
        assert (release.signer, release.history[1].actor) == ("trainer.pub", release.history[0].actor)
        assert release.history[1].cause.endswith("signed by trainer.pub")
        await ready.call("SetAlias", alias)
        # Another tenant's revisions need a certificate.
        certified = (await ready.upload("support", FILES, alias="-", tenant="initech")).revision
        await refused(
            create(certified.name, BUNDLE, "initech"), "SIGNATURE_INVALID", "is not signed by a certificate that"
        )
        by_certificate = await create(certified.name, (SIGNED / "certificate.sig").read_bytes(), "initech")
        assert by_certificate.signer == TRAINER
        assert by_certificate.history[1].cause.endswith(f"signed by {TRAINER}")
        # A third one has no rule.
        free = (await ready.upload("support", FILES, tenant="globex")).revision
        assert (await create(free.name, b"", "globex")).signer == ""
    await store.stop(drain_s=0)  # it writes the log's last lines
    records = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    created = [one["details"] for one in records if one.get("method") == "ReleaseService/CreateRelease"]
    assert [one["signer"] for one in created if "signer" in one] == ["trainer.pub", TRAINER]
    await store.start()


def test_what_a_trusted_key_signs_is_still_checked() -> None:
    key = ec.generate_private_key(ec.SECP521R1())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    trusted = [read_public_key("trainer.pub", public)]
    bundle = sign_statement("tenants/acme/adapters/a/releases/1", "sha256:" + "1" * 64, "release", {"a": 1}, pem)
    with pytest.raises(ArtifactError, match="signs no files by their SHA-256"):
        verify_files(bundle, trusted, {})
    with pytest.raises(ArtifactError, match="is not signed by a key"):
        verify_files(changed(bundle, lambda statement: statement.update(predicate={})), trusted, {})


@pytest.mark.parametrize("bundle", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"dsseEnvelope": {"payload": "\xc3\xa9"}}'])
def test_no_bundle_breaks_the_reader(bundle: bytes) -> None:
    with pytest.raises(ArtifactError, match="is not a bundle"):
        verify_files(bundle, [], {})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[acme", "Expected"),
        ("acme = 1\n", "acme is not a table"),
        ("[acme]\n", "acme.keys: give the names of files"),
        ('[acme]\nkeys = ["none"]\n', "none: No such file"),
        ('[acme]\nkeys = ["bad"]\n', "bad: is not a PEM file of a public key"),
        ("[acme]\nroots = []\n", "acme.roots: give the names of files"),
        ('[acme]\nroots = ["bad"]\n', "acme.roots: /"),
        ('[acme]\nroots = ["bad"]\n', "bad: is not a PEM file of root certificates"),
        ('[acme]\nroots = ["bad"]\nidentities = []\n', "acme.identities: give names in certificates"),
        ('[acme]\nkeys = ["bad"]\nidentities = ["a"]\n', "acme.identities: they are those of certificates"),
        ('[acme]\nkeys = ["bad"]\nkey = 1\n', "acme.key is not one of"),
        ('[acme]\nkeys = ["bad"]\nrequired = 1\n', "acme.required: is neither"),
    ],
)
def test_a_fault_of_the_file_is_named(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "bad").write_text("-----BEGIN PUBLIC KEY-----\nabc\n-----END PUBLIC KEY-----\n")
    path = tmp_path / "signers.toml"
    path.write_text(text)
    with pytest.raises(SignersError) as error:
        read_signers(path)
    assert fault in str(error.value)
    assert "\n" not in str(error.value)
