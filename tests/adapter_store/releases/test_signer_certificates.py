"""Certificates of signers: the chain in a bundle against the roots and identities that an operator trusts.

The bundles are the one that model-signing wrote, or have its statement under another signature and certificates.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from loraplex.contracts.artifacts import ArtifactError
from loraplex.releases.bundles import TrustedKey, TrustedRoots, read_certificates, verify_files
from tests.adapter_store.releases.test_signers import SIGNED, TRAINER

BUNDLE = (SIGNED / "certificate.sig").read_bytes()
PAYLOAD = base64.b64decode(json.loads(BUNDLE)["dsseEnvelope"]["payload"])
FILES = {one["name"]: f"sha256:{one['digest']}" for one in json.loads(PAYLOAD)["predicate"]["resources"]}
NOW = datetime.now(UTC)
CODE, TLS = ExtendedKeyUsageOID.CODE_SIGNING, ExtendedKeyUsageOID.CLIENT_AUTH
EMAIL = x509.RFC822Name("trainer@acme.example")


@dataclass(frozen=True)
class Issued:
    """A certificate with its private key."""

    certificate: x509.Certificate
    key: Any

    def sign(self, *others: Issued) -> bytes:
        """Return the bundle of this certificate, with those of its authorities."""
        fields = json.loads(BUNDLE)
        kind = "application/vnd.in-toto+json"
        signed = f"DSSEv1 {len(kind)} {kind} {len(PAYLOAD)} ".encode() + PAYLOAD
        is_ec = isinstance(self.key, ec.EllipticCurvePrivateKey)
        signature = self.key.sign(signed, ec.ECDSA(hashes.SHA256())) if is_ec else b"of another algorithm"
        fields["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(signature).decode()
        fields["verificationMaterial"]["x509CertificateChain"]["certificates"] = [
            {"rawBytes": base64.b64encode(one.certificate.public_bytes(Encoding.DER)).decode()}
            for one in (self, *others)
        ]
        return json.dumps(fields).encode()


def issue(
    issuer: Issued | None,
    common_name: str,
    names: Sequence[x509.GeneralName] = (),
    purposes: Sequence[x509.ObjectIdentifier] = (CODE,),
    usage: str = "digital_signature",
    days: tuple[int, int] = (-1, 1),
    key: Any = None,
) -> Issued:
    """Return a certificate that is valid between two days from now; without an issuer it has signed itself."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else [])
    signer = issuer.key if issuer else key
    bits = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign"
    )
    uses = dict.fromkeys([*bits.split(), "encipher_only", "decipher_only"], False) | {usage: True}
    builder = (
        x509.CertificateBuilder(issuer.certificate.subject if issuer else subject, subject, key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + timedelta(days[0]))
        .not_valid_after(NOW + timedelta(days[1]))
        .add_extension(x509.BasicConstraints(ca=usage == "key_cert_sign", path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**uses), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    for extension in (x509.SubjectAlternativeName(names), x509.ExtendedKeyUsage(purposes or [CODE])):
        if names if isinstance(extension, x509.SubjectAlternativeName) else purposes:
            builder = builder.add_extension(extension, critical=False)
    return Issued(builder.sign(signer, hashes.SHA256()), key)


def authority(issuer: Issued | None, name: str, **others: Any) -> Issued:
    return issue(issuer, name, **{"purposes": (), "usage": "key_cert_sign", **others})


def trust(*roots: Issued, identities: Sequence[str] = ()) -> TrustedRoots:
    return TrustedRoots(("ca.pem",), tuple(one.certificate for one in roots), tuple(identities))


def test_the_signer_is_the_identity_in_the_certificate() -> None:
    certificates = tuple(read_certificates("root.pem", (SIGNED / "root.pem").read_bytes()))
    for identities in ((), (TRAINER,), ("another", TRAINER)):
        assert verify_files(BUNDLE, [], FILES, TrustedRoots(("root.pem",), certificates, identities)) == TRAINER
    root = authority(None, "root")
    between = authority(root, "between", purposes=[CODE])
    host = x509.DNSName("ci.acme.example")
    assert verify_files(issue(root, "trainer").sign(), [], FILES, trust(root)) == "trainer"
    assert verify_files(issue(between, "a", [EMAIL, host]).sign(between), [], FILES, trust(root)) == EMAIL.value
    several = issue(root, "a", [EMAIL, host])
    assert verify_files(several.sign(), [], FILES, trust(root, identities=[host.value])) == host.value
    # The key of a certificate may be trusted by itself.
    key = TrustedKey("trainer.pub", several.key.public_key())
    assert verify_files(several.sign(), [key], FILES, trust(root, identities=["others"])) == "trainer.pub"


def faults() -> dict[str, tuple[bytes, TrustedRoots, str]]:
    root, other = authority(None, "root"), authority(None, "other")
    between, tls = authority(root, "between"), authority(root, "tls", purposes=[TLS])
    ended = authority(root, "ended", days=(-9, -2))
    ended_root = authority(None, "ended root", days=(-9, -2))
    good = issue(root, "trainer", [EMAIL])
    swapped = Issued(good.certificate, issue(root, "trainer").key)
    rsa_key = rsa.generate_private_key(65537, 2048)
    dates = f"{NOW - timedelta(9):%F} to {NOW - timedelta(2):%F}; sign with one that is valid now"
    later = issue(root, "trainer", days=(2, 9))
    no_root = "leads to no root that the store trusts for this tenant: ca.pem; use one that such a root has issued"
    wrong = (
        "is signed by trainer@acme.example, whom the store does not trust for this tenant; sign with the certificate of"
    )
    return {
        "expired": (
            issue(root, "old", [EMAIL], days=(-9, -2)).sign(),
            trust(root),
            f"of {EMAIL.value}, valid from {dates}",
        ),
        "not valid yet": (later.sign(), trust(root), "sign with one that is valid now"),
        "expired authority": (
            issue(ended, "a").sign(ended),
            trust(root),
            f"a certificate of ended, valid from {dates}",
        ),
        "expired root": (issue(ended_root, "a").sign(), trust(ended_root), f"of ended root, valid from {dates}"),
        "unknown root": (good.sign(), trust(other), no_root),
        "its own root": (good.sign(root), trust(other), no_root),
        "same name of a root": (issue(authority(None, "root"), "trainer").sign(), trust(root), no_root),
        "missing authority": (issue(between, "trainer").sign(), trust(root), no_root),
        "authority of others": (
            issue(tls, "trainer").sign(tls),
            trust(root),
            "may not issue certificates for code signing",
        ),
        "no authority": (issue(good, "trainer").sign(good), trust(root), no_root),
        "wrong identity": (good.sign(), trust(root, identities=["a", "b"]), f"{wrong} a or b"),
        "common name beside names": (good.sign(), trust(root, identities=["trainer"]), f"{wrong} trainer"),
        "no identity": (issue(root, "a\nb").sign(), trust(root), "names nobody; use one with an email"),
        "no purpose": (issue(root, "trainer", purposes=()).sign(), trust(root), "use one with the extended key usage"),
        "purpose of TLS": (issue(root, "trainer", purposes=[TLS]).sign(), trust(root), "not for signing code; use"),
        "key usage": (issue(root, "trainer", usage="key_agreement").sign(), trust(root), "not for signing code; use"),
        "other key": (swapped.sign(), trust(root), "is not signed by the key of its certificate"),
        "RSA": (issue(root, "trainer", key=rsa_key).sign(), trust(root), "not on the curve P-256, P-384 or P-521"),
        "many": (good.sign(*[root] * 5), trust(root), "has 6 certificates; sign with one and at most 4 of authorities"),
    }


@pytest.mark.parametrize("fault", faults().items(), ids=lambda fault: fault[0])
def test_a_certificate_that_does_not_hold_is_refused(fault: tuple[str, tuple[bytes, TrustedRoots, str]]) -> None:
    bundle, roots, message = fault[1]
    with pytest.raises(ArtifactError) as error:
        verify_files(bundle, [], FILES, roots)
    assert message in error.value.message
    assert (error.value.subject, "\n" in error.value.message) == ("model.sig", False)


def test_a_certificate_signs_only_the_files_with_these_digests() -> None:
    root = authority(None, "root")
    with pytest.raises(ArtifactError, match=r"adapter_model\.safetensors is sha256:0, but"):
        verify_files(issue(root, "a").sign(), [], {**FILES, "adapter_model.safetensors": "sha256:0"}, trust(root))


def test_no_changed_byte_of_a_certificate_passes_or_breaks_the_reader() -> None:
    root = authority(None, "root")
    between = authority(root, "between")
    fields = json.loads(issue(between, "a", [EMAIL]).sign(between))
    for certificate in fields["verificationMaterial"]["x509CertificateChain"]["certificates"]:
        whole = certificate["rawBytes"]
        for place, byte in enumerate(base64.b64decode(whole)):
            raw = bytearray(base64.b64decode(whole))
            raw[place] = byte ^ (1 + place % 255)
            certificate["rawBytes"] = base64.b64encode(raw).decode()
            with pytest.raises(ArtifactError):
                verify_files(json.dumps(fields).encode(), [], FILES, trust(root))
        certificate["rawBytes"] = whole
    assert verify_files(json.dumps(fields).encode(), [], FILES, trust(root)) == EMAIL.value


@pytest.mark.parametrize("chain", [[1], {"certificates": None}, {"certificates": [{}]}, {"certificates": [1]}, "a"])
def test_no_chain_breaks_the_reader(chain: Any) -> None:
    fields = json.loads(BUNDLE)
    fields["verificationMaterial"]["x509CertificateChain"] = chain
    with pytest.raises(ArtifactError, match="has certificates that cannot be read"):
        verify_files(json.dumps(fields).encode(), [], FILES, trust())
