"""The providers at which people sign in: OpenID Connect's code flow with PKCE, as a client of each issuer."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote_plus, urlencode, urlsplit

import jwt
import msgspec

from loraplex.gateway.errors import HttpError
from loraplex.gateway.sessions import Attempt, Session
from loraplex.issuers.signing_keys import is_safe
from loraplex.issuers.tokens import Issuer, JwtReader, SignIn
from loraplex.runtime.rpc.errors import CallError, Unavailable
from loraplex.runtime.rpc.timed_http import timed_call

T = TypeVar("T")
# Timeout in seconds of a provider's answer, and its maximum bytes.
_ANSWER_S, _ANSWER_BYTES = 5.0, 1 << 20
# Time in seconds for which what a provider says of itself is kept.
_METADATA_S = 600.0
# Maximum length in characters of a token that the cluster takes: a gRPC server reads headers of 8 KiB.
_TOKEN_CHARACTERS = 6_000


class _Metadata(msgspec.Struct):
    """Metadata of a provider (OpenID Connect Discovery 1.0, RFC 9207)."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    end_session_endpoint: str = ""
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    authorization_response_iss_parameter_supported: bool = False


class _Tokens(msgspec.Struct):
    """The answer of a token endpoint, in so far as it is used."""

    id_token: str = ""
    access_token: str = ""
    refresh_token: str = ""


class _Refusal(msgspec.Struct):
    """The answer of a token endpoint that refuses."""

    error: str = ""


def refused(message: str) -> HttpError:
    """Return the error of a sign-in that is not accepted."""
    return HttpError(403, "sign_in_refused", message)


class Providers:
    """The providers of the issuers with `sign_in` in a file. Raises ValueError where none has, or a secret is missing.

    `page` is the address to which they send people back.
    """

    def __init__(self, tokens: JwtReader, page: str) -> None:
        self.tokens, self._page = tokens, page
        self._redirect = f"{page}session/callback"
        self._metadata: dict[str, tuple[float, _Metadata]] = {}
        for one in self.offered.values():
            try:
                _secret_of(one)
            except OSError as error:
                raise ValueError(f"client_secret_file {one.client_secret_file}: {error.strerror}") from error
        if not self.offered:
            raise ValueError("no issuer has sign_in; give one, or leave out --page-url and --session-key")

    @property
    def offered(self) -> Mapping[str, SignIn]:
        """Return the issuers at which people may sign in."""
        return {name: issuer.sign_in for name, issuer in self.tokens.issuers.items() if issuer.sign_in}

    async def begin(self, issuer: str) -> tuple[str, Attempt]:
        """Return the address that asks a person to sign in, and what the answer must be of. Raises HttpError."""
        sign_in, metadata = await self._known(issuer)
        attempt = Attempt(issuer, *(secrets.token_urlsafe(32) for _ in range(3)))
        digest = hashlib.sha256(attempt.verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": sign_in.client_id,
            "redirect_uri": self._redirect,
            "scope": sign_in.scope,
            "state": attempt.state,
            "nonce": attempt.nonce,
            "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        return _with_query(metadata.authorization_endpoint, query), attempt

    async def finish(self, attempt: Attempt, answer: Mapping[str, str]) -> Session:
        """Return the session of a person whom the provider sent back with these parameters. Raises HttpError."""
        sign_in, metadata = await self._known(attempt.issuer)
        named = answer.get("iss")
        if named is None and metadata.authorization_response_iss_parameter_supported:
            raise refused("the answer does not say which issuer it is of; sign in again")
        if named not in {None, attempt.issuer}:
            raise refused("the answer is of another issuer than the one where you began to sign in")
        if "error" in answer:
            raise refused(f"{attempt.issuer} did not sign you in: {answer['error'][:100]}")
        if not (code := answer.get("code")):
            raise refused("the answer has no code; sign in again")
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": self._redirect}
        tokens = await self._tokens(sign_in, metadata, {**form, "code_verifier": attempt.verifier})
        claims = self._claims(attempt.issuer, sign_in, tokens.id_token)
        if claims.get("nonce") != attempt.nonce:
            raise refused("the answer is not of this sign-in (nonce); sign in again")
        return self._session(attempt.issuer, claims, tokens)

    async def renew(self, session: Session) -> Session | None:
        """Return a session with a new token; None where the provider gives none. Raises HttpError."""
        if not session.refresh_token or session.issuer not in self.offered:
            return None
        sign_in, metadata = await self._known(session.issuer)
        form = {"grant_type": "refresh_token", "refresh_token": session.refresh_token}
        try:
            tokens = await self._tokens(sign_in, metadata, form)
            tokens.refresh_token = tokens.refresh_token or session.refresh_token
            claims = self._claims(session.issuer, sign_in, tokens.id_token)
            renewed = self._session(session.issuer, claims, tokens)
        except HttpError as error:
            if error.status >= 500:
                raise
            return None
        return renewed if renewed.subject == session.subject else None

    async def end(self, session: Session) -> str:
        """Return the address at which the provider ends its own session too; the page's where it has none."""
        try:
            sign_in, metadata = await self._known(session.issuer)
        except HttpError:  # whoever signs out has signed out here, even while the provider is away
            return self._page
        if not metadata.end_session_endpoint:
            return self._page
        query = {"client_id": sign_in.client_id, "post_logout_redirect_uri": self._page}
        if session.is_id_token:
            query["id_token_hint"] = session.token
        return _with_query(metadata.end_session_endpoint, query)

    def _claims(self, issuer: str, sign_in: SignIn, id_token: str) -> Mapping[str, object]:
        """Return the claims of an ID token that this issuer made for this client. Raises HttpError."""
        if not id_token:
            raise refused(f"{issuer} returned no ID token")
        try:
            found, claims = self.tokens.verify(id_token, sign_in.client_id)
        except CallError as error:
            raise _http_error(error, "the ID token: ") from error
        if found.issuer != issuer or claims.get("azp", sign_in.client_id) != sign_in.client_id:
            raise refused("the ID token is of another issuer or client than the one where you signed in")
        if not isinstance(claims.get("sub"), str):
            raise refused("the ID token names nobody (sub)")
        return claims

    def _session(self, name: str, claims: Mapping[str, object], tokens: _Tokens) -> Session:
        """Return the session of a person with verified claims. Raises HttpError where the cluster takes no token."""
        issuer = self.tokens.issuers[name]
        is_id_token = not _is_for_cluster(issuer, tokens.access_token)
        token = tokens.id_token if is_id_token else tokens.access_token
        try:
            principal = self.tokens.read((("authorization", f"Bearer {token}"),), {})
        except CallError as error:
            raise _http_error(error) from error
        if principal is None or principal.expires_at is None:
            raise refused("the token is not one that the cluster takes")
        if len(token) > _TOKEN_CHARACTERS:
            raise refused(f"the token has {len(token)} characters; at most {_TOKEN_CHARACTERS}")
        shown = next((claims[one] for one in ("name", "preferred_username", "email", "sub") if claims.get(one)), "")
        return Session(
            issuer=name,
            subject=str(claims["sub"]),
            name=str(shown)[:100],
            tenant=principal.tenant,
            roles=sorted(principal.roles),
            token=token,
            is_id_token=is_id_token,
            refresh_token=tokens.refresh_token,
            ends_at=principal.expires_at,
        )

    async def _known(self, issuer: str) -> tuple[SignIn, _Metadata]:
        """Return how people sign in at an issuer, and what it says of itself. Raises HttpError."""
        sign_in = self.offered.get(issuer)
        if sign_in is None:
            raise HttpError(404, "unknown_issuer", "nobody signs in at this issuer here")
        made, metadata = self._metadata.get(issuer, (0.0, None))
        if metadata is None or time.monotonic() - made > _METADATA_S:
            address = f"{issuer.removesuffix('/')}/.well-known/openid-configuration"
            status, content = await _call("GET", address)
            metadata = _decoded(content, _Metadata, address) if status == http.client.OK else None
            if metadata is None or metadata.issuer != issuer:
                raise _away(f"{address} does not describe {issuer}")
            for endpoint in (metadata.authorization_endpoint, metadata.token_endpoint, metadata.end_session_endpoint):
                if endpoint and not is_safe(endpoint):
                    raise _away(f"{address} has an endpoint without https: {endpoint[:200]}")
            self._metadata[issuer] = time.monotonic(), metadata
        return sign_in, metadata

    async def _tokens(self, sign_in: SignIn, metadata: _Metadata, form: dict[str, str]) -> _Tokens:
        """Return the tokens that a provider gives for a code or a refresh token. Raises HttpError."""
        headers = {"content-type": "application/x-www-form-urlencoded", "accept": "application/json"}
        try:
            secret = await asyncio.to_thread(_secret_of, sign_in)
        except OSError as error:
            raise _away(f"client_secret_file {sign_in.client_secret_file}: {error.strerror}") from error
        if secret and "client_secret_basic" in metadata.token_endpoint_auth_methods_supported:
            pair = f"{quote_plus(sign_in.client_id)}:{quote_plus(secret)}"  # RFC 6749, 2.3.1
            headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form |= {"client_id": sign_in.client_id} | ({"client_secret": secret} if secret else {})
        status, content = await _call("POST", metadata.token_endpoint, urlencode(form), headers)
        if status in {http.client.BAD_REQUEST, http.client.UNAUTHORIZED}:
            why = _decoded(content, _Refusal, metadata.token_endpoint).error[:100]
            raise refused(f"{metadata.issuer} gives no token: {why}; sign in again")
        if status != http.client.OK:
            raise _away(f"{metadata.token_endpoint} answers {status}")
        return _decoded(content, _Tokens, metadata.token_endpoint)


def _is_for_cluster(issuer: Issuer, access_token: str) -> bool:
    """Tell whether an access token is a JWT of an audience that the cluster takes; of others the ID token is taken."""
    audiences = {issuer.audience} if isinstance(issuer.audience, str) else set(issuer.audience)
    try:
        named = jwt.decode(access_token, options={"verify_signature": False}).get("aud", [])
        return not audiences.isdisjoint([named] if isinstance(named, str) else named)
    except (jwt.PyJWTError, TypeError):  # of most providers it is no JWT
        return False


def _secret_of(sign_in: SignIn) -> str:
    file = sign_in.client_secret_file
    return Path(file).read_text(encoding="utf-8").strip() if file else ""


def _with_query(address: str, query: Mapping[str, str]) -> str:
    return f"{address}{'&' if '?' in address else '?'}{urlencode(query)}"


async def _call(method: str, address: str, *request: object) -> tuple[int, bytes]:
    """Return the status and content of a provider's answer. Raises HttpError where it does not answer."""
    try:
        status, content = await asyncio.to_thread(
            timed_call, _ANSWER_S, method, urlsplit(address), *request, most_bytes=_ANSWER_BYTES + 1
        )
    except (OSError, http.client.HTTPException) as error:
        raise _away(f"{address} does not answer: {error}") from error
    if len(content) > _ANSWER_BYTES:
        raise _away(f"{address} answers with more than {_ANSWER_BYTES} bytes")
    return status, content


def _decoded(content: bytes, kind: type[T], address: str) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _away(f"{address} answers with something else: {error}") from error


def _away(message: str) -> HttpError:
    return HttpError(503, "provider_away", message, retry_after_s=5.0)


def _http_error(error: CallError, what: str = "") -> HttpError:
    """Return the error of a token that the cluster does not take."""
    if isinstance(error, Unavailable):
        return _away(f"{what}{error.message}")
    return refused(f"{what}{error.message}")
