"""Signed statements: the bundles that model-signing writes of an adapter's files, and the releases that are exported.

Both are in-toto statements in a DSSE envelope in a Sigstore bundle, signed by a key on the curve P-256, P-384 or P-521:
https://github.com/sigstore/model-transparency, https://github.com/secure-systems-lab/dsse. Checked without a network.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from artifacts import ArtifactError
from artifacts.names import DIGEST_PREFIX

if TYPE_CHECKING:  # slow to import: a store without signers never does
    from cryptography.hazmat.primitives.asymmetric import ec

# The file of a bundle beside the files that it signs.
SIGNATURE_FILE = "model.sig"
# Maximum bytes of a bundle: one of two files has 2 KiB.
BUNDLE_BYTES = 256 * 1024
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_FILES = "https://model_signing/signature/v1.0"
_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_CURVES = ("secp256r1", "secp384r1", "secp521r1")


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key, under the name that a release has of its signer."""

    name: str
    key: ec.EllipticCurvePublicKey


def read_public_key(name: str, pem: bytes) -> TrustedKey:
    """Read a public key. Raises ArtifactError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise ArtifactError(name, "is not a PEM file of a public key on the curve P-256, P-384 or P-521")
    return TrustedKey(name, key)


def verify_files(bundle: bytes, keys: Sequence[TrustedKey], files: Mapping[str, str]) -> str:
    """Return the name of the key that has signed files, by name and digest. Raises ArtifactError(SIGNATURE_FILE)."""
    try:
        envelope = json.loads(bundle)["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        signature = base64.b64decode(envelope["signatures"][0]["sig"], validate=True)
        payload_type = envelope["payloadType"]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        raise ArtifactError(SIGNATURE_FILE, "is not a bundle as model-signing writes it") from None
    signer = next((one for one in keys if _has_signed(one.key, signature, payload)), None)
    if signer is None or payload_type != _PAYLOAD_TYPE:
        names = ", ".join(one.name for one in keys)
        raise ArtifactError(SIGNATURE_FILE, f"is not signed by a key that the store trusts for this tenant: {names}")
    signed = _signed_files(payload)
    for name, digest in files.items():
        if signed.get(name) != digest:
            have = f"{signed[name]} was signed" if name in signed else "it was not signed"
            raise ArtifactError(
                SIGNATURE_FILE,
                f"{name} is {digest}, but {have}; sign what is uploaded: a chat template or prompts beside an adapter "
                "become part of its configuration",
            )
    return signer.name


def _signed_files(payload: bytes) -> dict[str, str]:
    """Return the digests in a statement of a key that is trusted."""
    try:
        statement = json.loads(payload)
        resources = statement["predicate"]["resources"]
        digests = b"".join(bytes.fromhex(one["digest"]) for one in resources)
        (subject,) = statement["subject"]
        whole = subject["digest"]["sha256"] == hashlib.sha256(digests).hexdigest()
        if (statement["_type"], statement["predicateType"], whole) != (_STATEMENT, _FILES, True):
            raise ValueError
        return {one["name"]: DIGEST_PREFIX + one["digest"] for one in resources if one["algorithm"] == "sha256"}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ArtifactError(SIGNATURE_FILE, "signs no files by their SHA-256, as model-signing does") from None


def _has_signed(key: ec.EllipticCurvePublicKey, signature: bytes, payload: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, _authenticated(payload), _algorithm(key))
    except InvalidSignature:
        return False
    return True


def _authenticated(payload: bytes) -> bytes:
    """Return what DSSE signs of a payload."""
    return f"DSSEv1 {len(_PAYLOAD_TYPE)} {_PAYLOAD_TYPE} {len(payload)} ".encode() + payload


def _algorithm(key: ec.EllipticCurvePublicKey) -> Any:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.ECDSA({256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}[key.curve.key_size])


def sign_statement(
    name: str, digest: str, predicate_type: str, predicate: Mapping[str, Any], private_key: bytes
) -> bytes:
    """Return the bundle of a statement about `name`, whose digest is that. Raises ArtifactError for a bad key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    try:
        key = load_pem_private_key(private_key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
        raise ArtifactError("key", "is not a PEM file of a private key on the curve P-256, P-384 or P-521")
    subject = {"name": name, "digest": {"sha256": digest.removeprefix(DIGEST_PREFIX)}}
    statement = {"_type": _STATEMENT, "subject": [subject], "predicateType": predicate_type, "predicate": predicate}
    payload = json.dumps(statement, indent=2).encode()
    signature = key.sign(_authenticated(payload), _algorithm(key.public_key()))
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    bundle = {
        "mediaType": _BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": hashlib.sha256(pem).hexdigest()}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": _PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return json.dumps(bundle).encode()
