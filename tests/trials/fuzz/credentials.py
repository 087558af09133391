"""Readers of what only a router or an issuer can have signed: seals, grants of revisions, resume tokens, JWTs."""

from __future__ import annotations

import base64
import json
import tempfile
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ed25519
from msgspec import DecodeError

from loraplex.contracts.broker.commands import Command, Verb, encode_command
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import (
    AdapterRequest,
    Sealed,
    SealError,
    SealKind,
    decode_job,
    decode_record,
    encode_record,
)
from loraplex.contracts.broker.seals import Seals
from loraplex.contracts.broker.terms import Placement
from loraplex.issuers.tokens import JwtReader
from loraplex.router.generation.resume import Began, ResumeKeys, ResumePayload, ResumeTokens
from loraplex.runtime.rpc.errors import CallError
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.tenancy.signatures import (
    RevisionGrantIssuer,
    RevisionGrantVerifier,
    SignatureError,
    Signer,
    Verifier,
    left_s,
)
from tests.credentials_files import job_keys, router_seals, tls_files
from tests.trials.fuzz.queue_payloads import ADAPTER, JOBS
from tests.trials.fuzz.target import Target

_TENANT, _ISSUER, _AUDIENCE, _KEY_ID = "acme", "https://issuer.example", "loraplex", "ed"
_PLACE, _KEYS = "a list", Keys("hash", "main")
# Removed at the end of the process.
_folder = tempfile.TemporaryDirectory(prefix="fuzz-")
_directory = Path(_folder.name)
_router = router_seals(_directory, time.time)
_signer = Signer(tls_files(_directory, "loraplex://router/r"), Role.ROUTER)
_verifier = Verifier(tls_files(_directory, "loraplex://worker/w"), Role.ROUTER)
_job_keys = job_keys(_directory)
_job = _router.entry(_KEYS.prefix, decode_job(JOBS[1]), Placement())
_resume_tokens = ResumeTokens(ResumeKeys("a key of the tests"))
_issuer_key = ed25519.Ed25519PrivateKey.generate()
_claims = {"iss": _ISSUER, "aud": _AUDIENCE, "exp": time.time() + 86_400, "sub": "ann", "tenant": _TENANT}


def _worker() -> Seals:
    """Return the seals of a worker that has opened none."""
    return Seals(_job_keys, _verifier)


def _open_job(body: bytes, facts: bytes) -> None:
    """Open a claimed job; a worker refuses all that are made up."""
    with suppress(SealError):
        _worker().open_job(_KEYS.prefix, body, facts)


def _open_seals(data: bytes) -> None:
    sealed = decode_record(Sealed, data)
    failed: list[SealError] = []
    for kind in SealKind:
        try:
            _worker().open(kind, _PLACE, sealed)
        except SealError as error:
            failed.append(error)
    if len(failed) == len(SealKind):
        raise failed[0]


def _read_grant(data: bytes) -> None:
    left_s(data, time.time())
    RevisionGrantVerifier(_verifier).check(data, _TENANT, ADAPTER.revision)


def _read_resume_token(data: bytes) -> None:
    """Read the data as a token, and as what stands in one."""
    try:
        _run(_resume_tokens.verify(base64.urlsafe_b64encode(data).decode(), _TENANT))
    except CallError:
        _run(_resume_tokens.verify(data.decode("latin-1"), _TENANT))


def _run(call: Coroutine[Any, Any, object]) -> None:
    """Run a call that waits for nothing."""
    try:
        call.send(None)
    except StopIteration:
        return
    raise AssertionError("the call waits")


def _jwt_reader() -> JwtReader:
    made = jwt.algorithms.OKPAlgorithm.to_jwk(_issuer_key.public_key(), as_dict=True)
    path = _directory / "jwks.json"
    path.write_text(json.dumps({"keys": [{**made, "kid": _KEY_ID}]}))
    file = _directory / "issuers.json"
    file.write_text(json.dumps({"issuers": [{"issuer": _ISSUER, "audience": _AUDIENCE, "jwks": str(path)}]}))
    return JwtReader(str(file))


_tokens = _jwt_reader()


def _signed(payload: bytes) -> str:
    return jwt.PyJWS().encode(payload, _issuer_key, "EdDSA", {"kid": _KEY_ID})


def _read_web_token(text: str) -> None:
    _tokens.read((("authorization", f"Bearer {text}"),), {})


def _resume_token() -> bytes:
    payload = ResumePayload("r-1", "f" * 64, "hash", "sha256:" + "1" * 64, ADAPTER, 7, 8, Began(1, 0.1, 0.1, 0.2, 1.0))
    return _resume_tokens.sign(payload, _TENANT).encode()


# Beginnings of msgpack's arrays and texts, and arrays in arrays.
_PACKED = (b"\x91", b"\x93", b"\xdd\xff\xff\xff\xff", b"\xc4\xff", b"\xd9\x05", b"\xcb" + b"\xff" * 8, b"\x91" * 4_000)
# Arrays in each other behind the last field that a reader wants.
_DEEP = b"\x91" * 5_000 + b"\xc0"

CREDENTIALS: dict[str, Target] = {
    "seals": Target(
        _open_seals,
        (DecodeError, SealError),
        (
            encode_record(_router.seal(SealKind.JOB, _PLACE, JOBS[0])),
            encode_record(
                _router.seal(
                    SealKind.COMMAND, _PLACE, encode_command(Command(Verb.PIN, AdapterRequest(ADAPTER, _TENANT)))
                )
            ),
            encode_record(_router.seal(SealKind.PIN, _PLACE, b"x")),
        ),
    ),
    "sealed-jobs": Target(lambda data: _open_job(data, b"\x90"), (), (_job.body, *JOBS)),
    "facts": Target(
        lambda data: _open_job(_job.body, data),
        (),
        (b"\x9c" + b"\xa1a" * 12, b"\x9d" + b"\xa1a" * 5 + b"\x01" * 7 + _DEEP),
        _PACKED,
    ),
    "grants": Target(
        _read_grant,
        (SignatureError,),
        (RevisionGrantIssuer(_signer).issue(_TENANT, (ADAPTER.revision,)), b"\x94\xc4\x01a\x90\xc4\x01b" + _DEEP),
        _PACKED,
    ),
    "resume-tokens": Target(
        _read_resume_token, (CallError,), (_resume_token(), base64.urlsafe_b64decode(_resume_token())), _PACKED
    ),
    "web-tokens": Target(
        lambda data: _read_web_token(data.decode("latin-1")),
        (CallError,),
        (_signed(json.dumps(_claims).encode()).encode(), b"e30.e30.e30"),
        (b'{"alg":"none"}', b"eyJhbGciOiJub25lIn0", b"."),
    ),
    "web-claims": Target(
        lambda data: _read_web_token(_signed(data)),
        (CallError,),
        tuple(
            json.dumps({**_claims, **more}).encode()
            for more in (
                {},
                {"roles": ["tenant-admin"], "scope": "loraplex:generate x"},
                {"nbf": 0, "iat": 1.5, "aud": ["a", _AUDIENCE]},
            )
        ),
        (b'"tenant"', b'"roles"', b'"scope"', b'"exp"', b'"sub"', b"1e400", b"null", b"[]"),
    ),
}
