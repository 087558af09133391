"""Checks the bundles that model-signing writes of an adapter's files (contracts/artifacts/statements.py).

Without a network: the key is one that is trusted, or the bundle's certificates lead from it to a root certificate that
is trusted.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.names import DIGEST_PREFIX
from loraplex.contracts.artifacts.statements import (
    CURVES,
    PAYLOAD_TYPE,
    SIGNATURE_FILE,
    STATEMENT,
    algorithm,
    authenticated,
)

if TYPE_CHECKING:  # slow to import: a store without signers never does
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.verification import ClientVerifier, Policy

# Maximum bytes of a bundle: one of two files has 2 KiB.
BUNDLE_BYTES = 256 * 1024
# Maximum certificates of a bundle. The search for a path to a root tries them in every order, and strangers write them.
_CERTIFICATES = 5
# Maximum characters of an identity, which stands in releases and logs: an email address may have 254.
_IDENTITY_CHARACTERS = 256
_FILES = "https://model_signing/signature/v1.0"


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key, under the name that a release has of its signer."""

    name: str
    key: ec.EllipticCurvePublicKey


@dataclass(frozen=True, slots=True)
class TrustedRoots:
    """Root certificates, from the files `names`, and the identities that may sign below them; empty: any."""

    names: tuple[str, ...]
    certificates: tuple[x509.Certificate, ...]
    identities: tuple[str, ...]


def read_public_key(name: str, pem: bytes) -> TrustedKey:
    """Read a public key. Raises ArtifactError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in CURVES:
        raise ArtifactError(name, "is not a PEM file of a public key on the curve P-256, P-384 or P-521")
    return TrustedKey(name, key)


def read_certificates(name: str, pem: bytes) -> list[x509.Certificate]:
    """Read root certificates. Raises ArtifactError."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise ArtifactError(name, "is not a PEM file of root certificates") from None


def verify_files(
    bundle: bytes, keys: Sequence[TrustedKey], files: Mapping[str, str], roots: TrustedRoots | None = None
) -> str:
    """Return who has signed files, by name and digest: the name of a trusted key, or the identity of a certificate.

    Raises ArtifactError(SIGNATURE_FILE).
    """
    try:
        fields = json.loads(bundle)
        envelope = fields["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        signature = base64.b64decode(envelope["signatures"][0]["sig"], validate=True)
        payload_type = envelope["payloadType"]
        chain = fields.get("verificationMaterial", {}).get("x509CertificateChain")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise ArtifactError(SIGNATURE_FILE, "is not a bundle as model-signing writes it") from None
    signer = next((one.name for one in keys if _has_signed(one.key, signature, payload)), "")
    if not signer and roots is not None and chain:
        signer = _verify_certificates(_read_chain(chain), roots, signature, payload)
    if not signer or payload_type != PAYLOAD_TYPE:
        kinds = " or ".join((["a key"] if keys else []) + (["a certificate"] if roots else []))
        names = ", ".join([one.name for one in keys] + [*(roots.names if roots else ())])
        raise ArtifactError(SIGNATURE_FILE, f"is not signed by {kinds} that the store trusts for this tenant: {names}")
    signed = _signed_files(payload)
    for name, digest in files.items():
        if signed.get(name) != digest:
            have = f"{signed[name]} was signed" if name in signed else "it was not signed"
            raise ArtifactError(
                SIGNATURE_FILE,
                f"{name} is {digest}, but {have}; sign what is uploaded: a chat template or prompts beside an adapter "
                "become part of its configuration",
            )
    return signer


def _refused(message: str) -> ArtifactError:
    return ArtifactError(SIGNATURE_FILE, message)


def _read_chain(chain: Any) -> list[x509.Certificate]:
    """Return a bundle's certificates, the signer's first."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    unreadable = (UnsupportedAlgorithm, x509.DuplicateExtension, x509.InvalidVersion, x509.UnsupportedGeneralNameType)
    try:
        raw = [base64.b64decode(one["rawBytes"], validate=True) for one in chain["certificates"]]
        if not 0 < len(raw) <= _CERTIFICATES:
            raise _refused(f"has {len(raw)} certificates; sign with one and at most {_CERTIFICATES - 1} of authorities")
        certificates = [x509.load_der_x509_certificate(one) for one in raw]
        for one in certificates:  # these parts are parsed on their first use
            _ = one.public_key(), one.issuer, one.not_valid_before_utc, one.not_valid_after_utc, _identities(one)
    except (ValueError, TypeError, KeyError, *unreadable):
        raise _refused("has certificates that cannot be read; sign again with others") from None
    return certificates


def _verify_certificates(
    chain: Sequence[x509.Certificate], roots: TrustedRoots, signature: bytes, payload: bytes
) -> str:
    """Return the identity in the certificate whose key has signed a payload."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.verification import VerificationError

    key, now = chain[0].public_key(), datetime.now(UTC)
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in CURVES:
        raise _refused("has a certificate whose key is not on the curve P-256, P-384 or P-521; sign with another")
    if not _has_signed(key, signature, payload):
        raise _refused("is not signed by the key of its certificate; sign the directory again")
    try:
        _verifier(roots, now).verify(chain[0], list(chain[1:]))
    except VerificationError as error:
        raise _refused(_fault(chain, roots, now, error)) from None
    names = _identities(chain[0])
    if not names:
        raise _refused("has a certificate that names nobody; use one with an email, URI or DNS name, or a common name")
    if not _may_sign_code(chain[0]):
        must = "use one with the extended key usage codeSigning, and digitalSignature in its key usage"
        raise _refused(f"has a certificate of {names[0]} that is not for signing code; {must}")
    identity = next((name for name in names if name in (roots.identities or names)), "")
    if not identity:
        must = f"sign with the certificate of {' or '.join(roots.identities)}"
        raise _refused(f"is signed by {names[0]}, whom the store does not trust for this tenant; {must}")
    return identity


def _verifier(roots: TrustedRoots, now: datetime) -> ClientVerifier:
    """Return the library's check of chains, for code signing instead of TLS."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID as Usage
    from cryptography.x509.verification import Criticality, ExtensionPolicy, PolicyBuilder, Store

    def check_authority(_: Policy, __: x509.Certificate, use: x509.KeyUsage | x509.ExtendedKeyUsage | None) -> None:
        signs = use.key_cert_sign if isinstance(use, x509.KeyUsage) else True
        purposes = list(use) if isinstance(use, x509.ExtendedKeyUsage) else [Usage.CODE_SIGNING]
        if not signs or not {Usage.CODE_SIGNING, Usage.ANY_EXTENDED_KEY_USAGE} & {*purposes}:
            raise ValueError("an authority may not issue certificates for code signing")

    either = Criticality.AGNOSTIC
    # Roots that openssl makes have no key usage.
    authorities = ExtensionPolicy.webpki_defaults_ca().may_be_present(x509.KeyUsage, either, check_authority)
    authorities = authorities.may_be_present(x509.ExtendedKeyUsage, either, check_authority)
    # The signer's purposes and names are checked by the caller, with errors of their own.
    signers = ExtensionPolicy.webpki_defaults_ee().may_be_present(x509.ExtendedKeyUsage, either, None)
    signers = signers.may_be_present(x509.SubjectAlternativeName, either, None)
    policy = PolicyBuilder().store(Store(list(roots.certificates))).time(now).max_chain_depth(_CERTIFICATES - 1)
    return policy.extension_policies(ca_policy=authorities, ee_policy=signers).build_client_verifier()


def _fault(chain: Sequence[x509.Certificate], roots: TrustedRoots, now: datetime, error: Exception) -> str:
    """Return why certificates were refused: one is not valid now, or they lead to no root."""
    issuers = {one.issuer for one in chain}
    for one in [*chain, *(root for root in roots.certificates if root.subject in issuers)]:
        start, end = one.not_valid_before_utc, one.not_valid_after_utc
        if not start <= now <= end:
            name = next(iter(_identities(one)), "an authority")
            return f"has a certificate of {name}, valid from {start:%F} to {end:%F}; sign with one that is valid now"
    reason = " ".join(str(error).split())[:200]
    return (
        f"has a certificate that leads to no root that the store trusts for this tenant: {', '.join(roots.names)}; use "
        f"one that such a root has issued, with those between in --certificate_chain ({reason})"
    )


def _identities(certificate: x509.Certificate) -> list[str]:
    """Return the subject alternative names of a certificate, or its common name where it has none."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    kinds = (x509.RFC822Name, x509.UniformResourceIdentifier, x509.DNSName)
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = [name.value for name in alternatives if isinstance(name, kinds)]
    except x509.ExtensionNotFound:
        names = []
    names = names or [str(one.value) for one in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return [name for name in names if name.isprintable() and 0 < len(name) <= _IDENTITY_CHARACTERS]


def _may_sign_code(certificate: x509.Certificate) -> bool:
    from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID

    extensions: dict[Any, Any] = {one.oid: one.value for one in certificate.extensions}
    usage = extensions.get(ExtensionOID.KEY_USAGE)
    purposes = extensions.get(ExtensionOID.EXTENDED_KEY_USAGE, ())
    return ExtendedKeyUsageOID.CODE_SIGNING in purposes and (usage is None or usage.digital_signature)


def _signed_files(payload: bytes) -> dict[str, str]:
    """Return the digests in a statement of a key that is trusted."""
    try:
        statement = json.loads(payload)
        resources = statement["predicate"]["resources"]
        digests = b"".join(bytes.fromhex(one["digest"]) for one in resources)
        (subject,) = statement["subject"]
        whole = subject["digest"]["sha256"] == hashlib.sha256(digests).hexdigest()
        if (statement["_type"], statement["predicateType"], whole) != (STATEMENT, _FILES, True):
            raise ValueError
        return {one["name"]: DIGEST_PREFIX + one["digest"] for one in resources if one["algorithm"] == "sha256"}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ArtifactError(SIGNATURE_FILE, "signs no files by their SHA-256, as model-signing does") from None


def _has_signed(key: ec.EllipticCurvePublicKey, signature: bytes, payload: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, authenticated(payload), algorithm(key))
    except InvalidSignature:
        return False
    return True
