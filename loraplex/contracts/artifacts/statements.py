"""Signed statements: the bundles that model-signing writes of an adapter's files, and the releases that are exported.

Both are in-toto statements in a DSSE envelope in a Sigstore bundle, signed by a key on the curve P-256, P-384 or P-521:
https://github.com/sigstore/model-transparency, https://github.com/secure-systems-lab/dsse.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.names import DIGEST_PREFIX

if TYPE_CHECKING:  # slow to import: a store without signers never does
    from cryptography.hazmat.primitives.asymmetric import ec

# The file of a bundle beside the files that it signs.
SIGNATURE_FILE = "model.sig"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
CURVES = ("secp256r1", "secp384r1", "secp521r1")


def authenticated(payload: bytes) -> bytes:
    """Return what DSSE signs of a payload."""
    return f"DSSEv1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(payload)} ".encode() + payload


def algorithm(key: ec.EllipticCurvePublicKey) -> Any:
    """Return the signature algorithm of a key."""
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
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in CURVES:
        raise ArtifactError("key", "is not a PEM file of a private key on the curve P-256, P-384 or P-521")
    subject = {"name": name, "digest": {"sha256": digest.removeprefix(DIGEST_PREFIX)}}
    statement = {"_type": STATEMENT, "subject": [subject], "predicateType": predicate_type, "predicate": predicate}
    payload = json.dumps(statement, indent=2).encode()
    signature = key.sign(authenticated(payload), algorithm(key.public_key()))
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    bundle = {
        "mediaType": _BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": hashlib.sha256(pem).hexdigest()}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return json.dumps(bundle).encode()
