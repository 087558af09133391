"""The cluster's job keys: a file that routers and workers share, and that nobody else can read.

A line is a key: its id, a space, and 32 random bytes in URL-safe base64. The first key encrypts, all decrypt. The file
is read again when it changes. To take another key into use, first add its line below the others everywhere, then
move it to the top, and remove the old one once no job of it waits.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import re
import secrets
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from files import WatchedFiles
from rpc.tls import is_private

log = logging.getLogger(__name__)

KEY_BYTES = 32
# Description of the flags that name a file of job keys.
JOB_KEY_HELP = (
    "file with the keys that encrypt jobs in Redis, the same for all routers and workers; needed with --tls-cert "
    "(`loraplex certs dev` makes one)"
)
_ID = re.compile(r"[A-Za-z0-9._-]{1,32}")


def new_job_key(key_id: str = "") -> str:
    """Return a line with another key."""
    return f"{key_id or secrets.token_hex(4)} {base64.urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)).decode()}\n"


def check_job_key(path: str) -> None:
    """Raise ValueError where the setting names no file of job keys."""
    if not path:
        raise ValueError("--tls-cert: needs --job-key too; `loraplex certs dev` makes one")
    JobKeys(Path(path))


class JobKeys:
    """The keys of a file. Raises ValueError where it cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.is_file() and not is_private(path):
            log.warning("others than the owner may read %s; `chmod 600` it", path)
        self._files = WatchedFiles(path)
        self._changed()
        self._last_logged = ""
        self._take(self._read())

    @property
    def newest(self) -> tuple[str, AESGCM]:
        """Return the key that encrypts, and its id."""
        return next(iter(self._ciphers.items()))

    def find(self, key_id: str) -> AESGCM | None:
        """Return a key; None for an unknown one."""
        return self._ciphers.get(key_id)

    def derived(self, purpose: bytes) -> list[str]:
        """Return a secret for another purpose from each key, in their order."""
        self.look(recent=True)
        return [hmac.digest(key, b"loraplex " + purpose, "sha256").hex() for key in self._keys.values()]

    def look(self, *, recent: bool = False) -> bool:
        """Read the file again if it has changed; return whether it has. A file that cannot be used is not taken.

        With `recent` a look of a moment ago is enough.
        """
        try:
            if not self._changed(recent=recent):
                return False
            self._take(self._read())
        except ValueError as error:
            self._files.failed()
            if str(error) != self._last_logged:
                log.warning("keeps the former job keys: %s", error)
            self._last_logged = str(error)
            return False
        self._last_logged = ""
        log.info("read %s again", self._path)
        return True

    def _take(self, keys: dict[str, bytes]) -> None:
        self._keys = keys
        self._ciphers = {key_id: AESGCM(key) for key_id, key in keys.items()}

    def _changed(self, *, recent: bool = False) -> bool:
        try:
            return self._files.changed(recent=recent)
        except OSError as error:
            raise ValueError(f"--job-key {self._path}: {error.strerror}") from error

    def _read(self) -> dict[str, bytes]:
        keys: dict[str, bytes] = {}
        try:
            text = self._path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--job-key {self._path}: {error.strerror}") from error
        for line in text.splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            key_id, _, encoded = line.strip().partition(" ")
            try:
                key = base64.urlsafe_b64decode(encoded.strip())
            except binascii.Error:
                key = b""
            if not _ID.fullmatch(key_id) or len(key) != KEY_BYTES or key_id in keys:
                raise ValueError(f"--job-key {self._path}: key {len(keys) + 1}: write ID KEY, 32 bytes in base64")
            keys[key_id] = key
        if not keys:
            raise ValueError(f"--job-key {self._path}: no key")
        return keys
