"""Sessions of people who signed in: encrypted cookies, so that any gateway with the same keys serves them."""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from starlette.datastructures import Headers

from loraplex.gateway.errors import HttpError
from loraplex.issuers.signing_keys import is_safe
from loraplex.runtime.files import FollowedFiles, is_private

log = logging.getLogger(__name__)

# Minimum length in characters of a key: 32 hexadecimal bytes are twice as long.
_KEY_CHARACTERS = 32
# Maximum length in characters of a cookie's value, and maximum number of cookies of one value: browsers keep 4,096
# bytes of a cookie, and proxies take 16 KiB of headers.
_COOKIE_CHARACTERS, _COOKIES = 3_800, 3
# Time in seconds that a session may rest before it has ended, and that a person has for signing in.
SESSION_S, ATTEMPT_S = 12 * 3600, 600
T = TypeVar("T", "Session", "Attempt")


class Session(msgspec.Struct, frozen=True, array_like=True):
    """A person who signed in, with the token that the cluster takes, until `ends_at` in seconds since 1970."""

    issuer: str
    subject: str
    name: str
    tenant: str
    roles: list[str]
    token: str
    is_id_token: bool
    refresh_token: str
    ends_at: float


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """A sign-in that this browser began: what the provider's answer must be of."""

    issuer: str
    state: str
    nonce: str
    verifier: str


_NAMES: dict[type[Session] | type[Attempt], str] = {Session: "loraplex-session", Attempt: "loraplex-sign-in"}


class Cookies:
    """Reads and writes cookies of the page at `page_url`. Raises ValueError on a file or URL that cannot be used.

    The file has a key a line: the first encrypts, all decrypt.
    """

    def __init__(self, key_file: str, page_url: str) -> None:
        url = urlsplit(page_url)
        if not is_safe(page_url) or not url.netloc or url.path.strip("/") or url.query or url.fragment:
            raise ValueError(f"--page-url {page_url}: write https://HOST, without a path")
        self.page = f"{url.scheme}://{url.netloc}/"
        # No other host of the site can set a cookie with the prefix.
        self._prefix, self._secure = ("__Host-", "; Secure") if url.scheme == "https" else ("", "")
        path = Path(key_file)
        self._keys = FollowedFiles(f"--session-key {key_file}", [path], lambda: _read_keys(path))

    def read(self, kind: type[T], headers: Headers) -> T | None:
        """Return what a request's cookies have of a kind; None for nothing, or what no key of this file encrypted."""
        cookies = _cookies(headers)
        parts = [cookies.get(self._name(kind, number), "") for number in range(_COOKIES)]
        text = "".join(parts[: parts.index("")] if "" in parts else parts)
        if not text:
            return None
        self._keys.look(recent=True)
        try:
            ttl_s = SESSION_S if kind is Session else ATTEMPT_S
            name, content = msgspec.msgpack.decode(
                self._keys.content.decrypt(text, ttl_s), type=tuple[str, msgspec.Raw]
            )
            return msgspec.msgpack.decode(content, type=kind) if name == _NAMES[kind] else None
        except (InvalidToken, msgspec.DecodeError):
            return None

    def write(self, value: Session | Attempt) -> list[tuple[str, str]]:
        """Return the headers that set a value, and clear what a longer one had. Raises HttpError on one too long."""
        kind = type(value)
        self._keys.look(recent=True)
        text = self._keys.content.encrypt(msgspec.msgpack.encode((_NAMES[kind], value))).decode()
        parts = [text[at : at + _COOKIE_CHARACTERS] for at in range(0, len(text), _COOKIE_CHARACTERS)]
        if len(parts) > _COOKIES:
            most = _COOKIE_CHARACTERS * _COOKIES
            raise HttpError(403, "session_too_large", f"the session has {len(text)} characters; at most {most}")
        age = "" if kind is Session else f"; Max-Age={ATTEMPT_S}"
        written = [self._header(kind, number, part, age) for number, part in enumerate(parts)]
        return [*written, *self.clear(kind, len(parts))]

    def clear(self, kind: type[Session] | type[Attempt], first: int = 0) -> list[tuple[str, str]]:
        """Return the headers that clear a kind's cookies, from the number `first` on."""
        return [self._header(kind, number, "", "; Max-Age=0") for number in range(first, _COOKIES)]

    def _header(self, kind: type[Session] | type[Attempt], number: int, value: str, age: str) -> tuple[str, str]:
        name = self._name(kind, number)
        return "set-cookie", f"{name}={value}; Path=/; HttpOnly; SameSite=Lax{self._secure}{age}"

    def _name(self, kind: type[Session] | type[Attempt], number: int) -> str:
        return f"{self._prefix}{_NAMES[kind]}" + (f"-{number}" if number else "")

    def as_bearer(self, headers: Headers) -> Headers:
        """Return a request's headers with its session's token as the credential.

        A credential of its own goes first; and only requests of the page itself have a session, which their browser
        says in a header that no script can set: other sites may make a browser send cookies.
        """
        if "authorization" in headers or "x-api-key" in headers or not is_own_page(headers):
            return headers
        session = self.read(Session, headers)
        if session is None:
            return headers
        return Headers(raw=[*headers.raw, (b"authorization", f"Bearer {session.token}".encode())])


def is_own_page(headers: Headers) -> bool:
    """Tell whether a page of this very origin made a request, as its browser says."""
    return headers.get("sec-fetch-site") == "same-origin"


def _cookies(headers: Headers) -> dict[str, str]:
    pairs = (pair.strip().partition("=") for line in headers.getlist("cookie") for pair in line.split(";"))
    return {name: value for name, _, value in pairs}


def _read_keys(path: Path) -> MultiFernet:
    """Return the keys of a file. Raises OSError or ValueError."""
    lines: Sequence[str] = path.read_text(encoding="utf-8").split()
    if not lines or min(map(len, lines)) < _KEY_CHARACTERS:
        raise ValueError(f"--session-key {path}: a key a line, of {_KEY_CHARACTERS} characters or more")
    if not is_private(path):
        log.warning("others than the owner may read %s; `chmod 600` it", path)
    digests = (hashlib.sha256(line.encode()).digest() for line in lines)
    return MultiFernet([Fernet(base64.urlsafe_b64encode(digest)) for digest in digests])
