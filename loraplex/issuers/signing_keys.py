"""The keys with which an issuer signs: a JWKS in a file or at a URL, read again when it changes."""

from __future__ import annotations

import asyncio
import http.client
import logging
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt

from loraplex.runtime.files import FollowedFiles
from loraplex.runtime.json_object import parse_object
from loraplex.runtime.rpc.errors import Unavailable
from loraplex.runtime.rpc.timed_http import timed_call
from loraplex.runtime.telemetry.logging import LogOnce
from loraplex.runtime.tenancy.guard import is_loopback

log = logging.getLogger(__name__)

# Algorithms by type of key, and by curve. All have a private and a public key: whoever can check a token must not be
# able to make one.
ALGORITHMS: Mapping[str, frozenset[str]] = {
    "RSA": frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}),
    "P-256": frozenset({"ES256"}),
    "P-384": frozenset({"ES384"}),
    "P-521": frozenset({"ES512"}),
    "Ed25519": frozenset({"EdDSA"}),
}
# Interval in seconds between looks at a JWKS, by URL and in a file; and after a token with an unknown key by URL.
LOOK_URL_S, LOOK_FILE_S, UNKNOWN_KEY_S = 60.0, 1.0, 10.0
# Timeout in seconds of a download, and its maximum bytes.
FETCH_S = 5.0
_JWKS_BYTES = 1 << 20
# Minimum bits of an RSA key: shorter ones can be broken.
_RSA_BITS = 2_048


def is_safe(url: str) -> bool:
    """Tell whether nobody between can change what a URL answers: by https, or on this machine."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A public key, and the algorithms that it may be used with."""

    key: Any
    algorithms: frozenset[str]


class SigningKeys:
    """The keys of a JWKS in a file or at a URL. Raises ValueError on a source that cannot be one, or a bad file."""

    def __init__(self, source: str) -> None:
        self._url = source if "://" in source else ""
        self._file: FollowedFiles[dict[str, SigningKey]] | None = None
        self._keys: dict[str, SigningKey] = {}
        self._looked_at, self._missing_key = -LOOK_URL_S, False
        self._once = LogOnce(log)
        self.loaded = False
        # Grows with every change, so that checks of before it are forgotten.
        self.version = 0
        if self._url:
            if not is_safe(source):
                raise ValueError(f"jwks {source}: write https://..., or a file")
        else:
            path = Path(source)
            self._file = FollowedFiles(f"jwks {path}", [path], lambda: _read_keys(path.read_bytes(), source))
            self._take(self._file.content)

    def find(self, key_id: str | None) -> SigningKey | None:
        """Return a key; without an id the only one. Raises Unavailable before the first answer of the URL."""
        if not self.loaded:
            raise Unavailable("the keys that sign tokens cannot be read yet", reason="JWKS_MISSING")
        if key_id is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        key = self._keys.get(key_id)
        if key is None:
            self._missing_key = True
        return key

    async def look_if_due(self) -> None:
        """Look at a file, and from time to time at a URL: sooner while a key is missing."""
        again_s = UNKNOWN_KEY_S if self._missing_key else LOOK_URL_S
        if not (self._url and self.loaded) or time.monotonic() - self._looked_at >= again_s:
            await self.look()

    async def look(self) -> None:
        """Read the keys; where that fails, keep the former ones."""
        if self._file is not None:
            if self._file.look():
                self._take(self._file.content)
            return
        self._looked_at, self._missing_key = time.monotonic(), False
        try:
            self._take(_read_keys(await asyncio.to_thread(_fetch, self._url), self._url))
            self._once.reset()
        except (ValueError, OSError, http.client.HTTPException) as error:
            self._once(f"keeps the former keys: {error}")

    def _take(self, keys: dict[str, SigningKey]) -> None:
        if set(keys) != set(self._keys) or not self.loaded:
            log.info("has %d keys of %s", len(keys), self._url or "the file")
        self._keys = keys
        self.loaded = True
        self.version += 1


def _read_keys(content: bytes, source: str) -> dict[str, SigningKey]:
    """Return the keys of a JWKS for signatures, by id. Raises ValueError."""
    try:
        listed = parse_object(content)["keys"]
        keys: dict[str, SigningKey] = {}
        for one in listed:
            if (algorithms := _algorithms_of(one)) and (key := _read_key(one, min(algorithms), source)) is not None:
                keys[str(one.get("kid", ""))] = SigningKey(key, algorithms)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"jwks {source}: not a JWKS: {error}") from error
    if not keys:
        raise ValueError(f"jwks {source}: no key for signatures among {len(listed)}")
    return keys


def _algorithms_of(listed: Mapping[str, Any]) -> frozenset[str]:
    """Return the algorithms that a key of a JWKS checks signatures with; none for other keys."""
    if listed.get("use", "sig") != "sig" or "verify" not in listed.get("key_ops", ["verify"]):
        return frozenset()
    algorithms = ALGORITHMS.get(listed.get("crv", listed.get("kty")), frozenset())
    return algorithms & {listed["alg"]} if "alg" in listed else algorithms


def _read_key(listed: Mapping[str, Any], algorithm: str, source: str) -> Any:
    """Return the public key; None for one that cannot be used, which must not keep the others from being taken."""
    try:
        key: Any = jwt.PyJWK(dict(listed), algorithm=algorithm).key
        if algorithm in ALGORITHMS["RSA"] and key.key_size < _RSA_BITS:
            raise ValueError(f"{key.key_size} bits; RSA keys need {_RSA_BITS}")
    except (ValueError, TypeError, jwt.PyJWTError) as error:
        log.warning("jwks %s: key %r is not used: %s", source, listed.get("kid"), error)
        return None
    return key


def _fetch(url: str) -> bytes:
    """Download a JWKS; blocks. Raises OSError, HTTPException or ValueError."""
    status, content = timed_call(FETCH_S, "GET", urllib.parse.urlsplit(url), most_bytes=_JWKS_BYTES + 1)
    if status != http.client.OK:  # a redirect too: the settings name the one place that keys come from
        raise ValueError(f"jwks {url}: it answers {status}")
    if len(content) > _JWKS_BYTES:
        raise ValueError(f"jwks {url}: more than {_JWKS_BYTES} bytes")
    return content
