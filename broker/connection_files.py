"""Files of a connection to Redis that are read again when they change: certificates, and the user's password."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from redis.asyncio.connection import Connection, RedisSSLContext, SSLConnection, parse_url
from redis.credentials import CredentialProvider

from files import WatchedFiles

log = logging.getLogger(__name__)

# Options of a URL that name files.
FILE_OPTIONS = {"password_file", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}


class TLSConnection(SSLConnection):
    """A connection over TLS that is opened with the files as they are then."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        options = self.ssl_context
        arguments = dict(Connection._connection_arguments(self))
        arguments["ssl"] = _files(options.ca_certs, options.certfile, options.keyfile).context(options)
        return arguments


class _Files:
    """The certificate files of all connections with the same options."""

    def __init__(self, *names: str | None) -> None:
        self._watched = WatchedFiles(*(name for name in names if name))
        self._context: ssl.SSLContext | None = None

    def context(self, options: RedisSSLContext) -> ssl.SSLContext:
        """Return the context of a new connection. Raises OSError where the files were never good."""
        try:
            if self._watched.changed() or self._context is None:
                self._context = _make_context(options)
        except OSError as error:  # ssl.SSLError too: one of the files has been replaced, the other follows
            self._watched.failed()
            if self._context is None:
                raise
            log.warning("keeps the former certificates of Redis: %s", error)
        return self._context


@cache
def _files(ca: str | None, cert: str | None, key: str | None) -> _Files:
    return _Files(ca, cert, key)


def _make_context(options: RedisSSLContext) -> ssl.SSLContext:
    """Return a context that trusts the given authorities alone; the system's where none are given."""
    context = ssl.create_default_context(cafile=options.ca_certs)
    context.check_hostname = options.check_hostname
    context.verify_mode = ssl.VerifyMode(options.cert_reqs)
    for flag in options.include_verify_flags or ():
        context.verify_flags |= flag
    for flag in options.exclude_verify_flags or ():
        context.verify_flags &= ~flag
    if options.certfile or options.keyfile:
        context.load_cert_chain(options.certfile or "", options.keyfile, password="")  # no question at a terminal
    if options.min_version is not None:
        context.minimum_version = options.min_version
    return context


def url_options(url: str) -> dict[str, Any]:
    """Return the options of a URL of one server. Raises ValueError where a file that it names cannot be read."""
    options: dict[str, Any] = dict(parse_url(url))
    for name in FILE_OPTIONS & set(options):
        if not os.access(options[name], os.R_OK):
            raise ValueError(f"{name}: cannot read {options[name]}")
    if "password_file" in options:
        if "password" in options:
            raise ValueError("give a password or a password_file")
        user, path = options.pop("username", ""), Path(options.pop("password_file"))
        options["credential_provider"] = PasswordFile(user, path)
    return options


class PasswordFile(CredentialProvider):
    """A user whose password is the first line of a file, read for every connection."""

    def __init__(self, user: str, path: Path) -> None:
        self._user = user
        self._path = path
        self._read()

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the user, unless it is the default one, and the password. The library makes errors its own."""
        password = self._read()
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Return the same."""
        return self.get_credentials()

    def _read(self) -> str:
        try:
            password = self._path.read_text().partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"password_file: cannot read {self._path}") from error
        if not password:
            raise ValueError(f"password_file: {self._path} is empty")
        return password
