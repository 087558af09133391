"""Every credential of the cases: keys, tokens and certificates of each role, right and with each fault."""

from __future__ import annotations

import base64
import hmac
import json
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.protobuf.duration_pb2 import Duration

from loraplex.admin.v1 import keys_pb2, keys_pb2_grpc
from loraplex.cli.development_ca import DevelopmentCa
from loraplex.runtime.rpc.principal import TENANT_ROLES, Role
from loraplex.runtime.tenancy.api_keys import KEY_ROLES, new_api_key

TENANT, OTHER = "acme", "globex"
ISSUER, AUDIENCE = "https://issuer.example", "loraplex"
# A scope that no method of these servers has.
IDLE_SCOPE = "relay"

_URIS = {Role.TENANT_USER: f"loraplex://tenant/{TENANT}"}
_URIS |= {role: f"loraplex://{role}/{TENANT}" for role in (Role.TENANT_ADMIN, Role.TRAINER)}

Pair = tuple[bytes, bytes]


@dataclass
class Credentials:
    """Bearers (keys and tokens) and certificates, by kind, role and fault."""

    ca: DevelopmentCa
    bearers: dict[tuple[str, Role, str], str] = field(default_factory=dict)
    certificates: dict[tuple[Role, str], Pair] = field(default_factory=dict)


def make_certificates(found: Credentials) -> None:
    """Make the certificates of every role."""
    other = DevelopmentCa()
    for role in Role:
        uri = _URIS.get(role, f"loraplex://{role.value}/one")
        found.certificates[role, "none"] = found.ca.issue(uri)
        found.certificates[role, "expired"] = found.ca.issue(uri, life=timedelta(hours=-1))
        found.certificates[role, "wrong CA"] = other.issue(uri)
        found.certificates[role, "names nobody"] = found.ca.issue(uri.replace("loraplex://", "https://"))


class Issuer:
    """Signs tokens; `file` is the file of issuers."""

    def __init__(self, directory: Path) -> None:
        self._key = rsa.generate_private_key(65537, 2048)
        self._stranger = rsa.generate_private_key(65537, 2048)
        public: dict[str, Any] = jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        jwks, self.file = directory / "jwks.json", directory / "issuers.json"
        jwks.write_text(json.dumps({"keys": [{**public, "kid": "one", "use": "sig"}]}))
        self.file.write_text(json.dumps({"issuers": [{"issuer": ISSUER, "audience": AUDIENCE, "jwks": str(jwks)}]}))

    def make_tokens(self, found: Credentials) -> None:
        """Make the tokens of every role that tokens may have."""
        now = time.time()
        for role in KEY_ROLES:
            claims: dict[str, Any] = {"iss": ISSUER, "aud": AUDIENCE, "exp": now + 3600, "roles": [role.value]}
            if role in TENANT_ROLES:
                claims["tenant"] = TENANT
            made = {
                "none": self._sign(claims),
                "wrong": jwt.encode(claims, self._stranger, "RS256", {"kid": "one"}),
                "expired": self._sign({**claims, "exp": now - 3600}),
                "not yet": self._sign({**claims, "nbf": now + 3600}),
                "no algorithm": jwt.encode(claims, "", "none", {"kid": "one"}),
                "wrong algorithm": self._signed_with_the_public_key(claims),
                "wrong audience": self._sign({**claims, "aud": "another"}),
                "wrong issuer": self._sign({**claims, "iss": "https://another.example"}),
                "other scope": self._sign({**claims, "scope": f"openid loraplex:{IDLE_SCOPE}"}),
            }
            found.bearers.update({("jwt", role, fault): text for fault, text in made.items()})

    def _sign(self, claims: dict[str, Any]) -> str:
        return jwt.encode(claims, self._key, "RS256", {"kid": "one"})

    def _signed_with_the_public_key(self, claims: dict[str, Any]) -> str:
        """Return a token that a verifier accepts which lets the token choose HS256."""
        public = self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        parts = [json.dumps(part).encode() for part in ({"alg": "HS256", "kid": "one", "typ": "JWT"}, claims)]
        signed = b".".join(map(_encoded, parts))
        return (signed + b"." + _encoded(hmac.digest(public, signed, "sha256"))).decode()


def _encoded(part: bytes) -> bytes:
    return base64.urlsafe_b64encode(part).rstrip(b"=")


async def make_keys(found: Credentials, operators: grpc.aio.Channel, bootstrap: str) -> None:
    """Make the API keys of every role that keys may have, at the store's operators' port with its first key."""
    stub: Any = keys_pb2_grpc.KeyServiceStub(operators)
    first = (("authorization", f"Bearer {bootstrap}"),)

    async def create(role: Role, scope: str = "", **fields: Any) -> Any:
        tenant, scopes = TENANT if role in TENANT_ROLES else "", [scope] if scope else []
        request = keys_pb2.CreateKeyRequest(tenant=tenant, role=role.value, scopes=scopes, **fields)
        return await stub.CreateKey(request, metadata=first)

    for role in KEY_ROLES:
        right, revoked, rotated = [await create(role) for _ in range(3)]
        await stub.RevokeKey(keys_pb2.RevokeKeyRequest(key_id=revoked.key.key_id), metadata=first)
        rotation = keys_pb2.RotateKeyRequest(key_id=rotated.key.key_id, grace=Duration())
        await stub.RotateKey(rotation, metadata=first)
        made = {
            "none": right.api_key,
            "wrong": new_api_key(right.key.key_id)[1],
            "unknown": new_api_key()[1],
            "malformed": right.api_key[:-1],
            "expired": (await create(role, ttl=Duration(nanos=1_000_000))).api_key,
            "revoked": revoked.api_key,
            "rotated away": rotated.api_key,
            "other scope": (await create(role, IDLE_SCOPE)).api_key,
        }
        found.bearers.update({("key", role, fault): text for fault, text in made.items()})
