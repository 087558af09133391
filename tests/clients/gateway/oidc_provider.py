"""A provider of OpenID Connect on this machine: discovery, a form, codes with PKCE, tokens, keys, sign-out."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote_plus, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

CLIENT, SECRET = "the page", "a secret: with signs"
_PATHS = {"authorization_endpoint": "/authorize", "token_endpoint": "/token", "jwks_uri": "/keys"}


@dataclass
class Provider:
    """A provider whose people have these claims; `faults` change an ID token, `names_issuer` the answer's `iss`."""

    people: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: dict[str, Any] = field(default_factory=dict)
    access_claims: dict[str, Any] | None = None
    names_issuer: str | None = None
    life_s: float = 300.0
    issuer: str = ""
    # Requests of codes and refresh tokens, by each.
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    refresh_tokens: dict[str, str] = field(default_factory=dict)
    signed_out: list[dict[str, str]] = field(default_factory=list)
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def keys(self) -> dict[str, Any]:
        """Return the JWKS."""
        return {"keys": [{**jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key(), as_dict=True), "kid": "one"}]}

    def metadata(self) -> dict[str, Any]:
        """Return what discovery answers."""
        return {
            "issuer": self.issuer,
            **{name: self.issuer + path for name, path in _PATHS.items()},
            "end_session_endpoint": f"{self.issuer}/end?from=discovery",
            "authorization_response_iss_parameter_supported": True,
            "code_challenge_methods_supported": ["S256"],
        }

    def authorize(self, query: dict[str, str], person: str) -> str:
        """Return the address that sends a person back with a code, as the form does."""
        assert (query["response_type"], query["client_id"]) == ("code", CLIENT)
        assert query["code_challenge_method"] == "S256"
        assert "openid" in query["scope"].split()
        code = secrets.token_urlsafe(16)
        self.codes[code] = {**query, "sub": person}
        answer = {"code": code, "state": query["state"], "iss": self.names_issuer or self.issuer}
        return f"{query['redirect_uri']}?{urlencode({name: text for name, text in answer.items() if text != 'none'})}"

    def token(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer of the token endpoint."""
        pair = base64.b64decode(authorization.removeprefix("Basic ")).decode().split(":")
        if [unquote_plus(part) for part in pair] != [CLIENT, SECRET]:
            return 401, {"error": "invalid_client"}
        if form["grant_type"] == "refresh_token":
            person, nonce = self.refresh_tokens.pop(form["refresh_token"], ""), None
        else:
            asked = self.codes.pop(form["code"], {})  # a code counts once
            digest = hashlib.sha256(form["code_verifier"].encode()).digest()
            challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            right = challenge == asked.get("code_challenge") and form["redirect_uri"] == asked["redirect_uri"]
            person, nonce = (asked["sub"], asked["nonce"]) if right else ("", None)
        if not person:
            return 400, {"error": "invalid_grant"}
        common = {"iss": self.issuer, "sub": person, "exp": time.time() + self.life_s}
        claims = {"aud": CLIENT, "nonce": nonce, **common, **self.people[person], **self.faults}
        refresh_token = secrets.token_urlsafe(16)
        self.refresh_tokens[refresh_token] = person
        access = "opaque" if self.access_claims is None else self._sign(common | self.access_claims)
        made = {"id_token": self._sign(claims), "access_token": access, "refresh_token": refresh_token}
        return 200, {"token_type": "Bearer", "expires_in": self.life_s, **made}

    def _sign(self, claims: dict[str, Any]) -> str:
        return jwt.encode({k: v for k, v in claims.items() if v is not None}, self.key, "ES256", {"kid": "one"})


@contextmanager
def running(provider: Provider) -> Iterator[Provider]:
    """Serve a provider while the context is open."""

    class Handler(BaseHTTPRequestHandler):
        """Answers the requests of browsers and clients."""

        def do_GET(self) -> None:
            """Answer discovery, keys, the form, and sign-outs."""
            url = urlsplit(self.path)
            query = dict(parse_qsl(url.query))
            match url.path:
                case "/.well-known/openid-configuration":
                    self._answer(200, provider.metadata())
                case "/keys":
                    self._answer(200, provider.keys())
                case "/authorize":
                    self._answer(200, b"<!doctype html><form method=post><input name=sub id=sub></form>")
                case "/end":
                    provider.signed_out.append(query)
                    self._redirect(query["post_logout_redirect_uri"])
                case _:
                    self._answer(404, {})

        def do_POST(self) -> None:
            """Answer the form with a redirect, and codes with tokens."""
            url = urlsplit(self.path)
            form = dict(parse_qsl(self.rfile.read(int(self.headers["content-length"])).decode()))
            if url.path == "/authorize":
                self._redirect(provider.authorize(dict(parse_qsl(url.query)), form["sub"]))
            else:
                self._answer(*provider.token(form, self.headers.get("authorization", "")))

        def _redirect(self, address: str) -> None:
            self.send_response(302)
            self.send_header("location", address)
            self.send_header("content-length", "0")
            self.end_headers()

        def _answer(self, status: int, value: object) -> None:
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "text/html" if isinstance(value, bytes) else "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider.issuer = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
