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

from loraplex.runtime.files import FollowedFiles, is_private

log = logging.getLogger(__name__)

KEY_BYTES = 32
# Description of the flags that name a file of job keys.
JOB_KEY_HELP = (
    "file with the keys that encrypt jobs in Redis, the same for all routers and workers; needed with --tls-cert; "
    "`loraplex certs dev` makes one"
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


class JobKeys(FollowedFiles[dict[str, tuple[bytes, AESGCM]]]):
    """The keys of a file and what decrypts with each, by id. Raises ValueError where it cannot be used."""

    def __init__(self, path: Path) -> None:
        if path.is_file() and not is_private(path):
            log.warning("others than the owner may read %s; `chmod 600` it", path)
        super().__init__(f"--job-key {path}", [path], lambda: _read(path))

    @property
    def newest(self) -> tuple[str, AESGCM]:
        """Return the key that encrypts, and its id."""
        key_id, (_, cipher) = next(iter(self.content.items()))
        return key_id, cipher

    def find(self, key_id: str) -> AESGCM | None:
        """Return a key; None for an unknown one."""
        return self.content[key_id][1] if key_id in self.content else None

    def derived(self, purpose: bytes) -> list[str]:
        """Return a secret for another purpose from each key, in their order."""
        self.look(recent=True)
        return [hmac.digest(key, b"loraplex " + purpose, "sha256").hex() for key, _ in self.content.values()]


def _read(path: Path) -> dict[str, tuple[bytes, AESGCM]]:
    keys: dict[str, tuple[bytes, AESGCM]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        key_id, _, encoded = line.strip().partition(" ")
        try:
            key = base64.urlsafe_b64decode(encoded.strip())
        except binascii.Error:
            key = b""
        if not _ID.fullmatch(key_id) or len(key) != KEY_BYTES or key_id in keys:
            raise ValueError(f"--job-key {path}: key {len(keys) + 1}: write ID KEY, 32 bytes in base64")
        keys[key_id] = key, AESGCM(key)
    if not keys:
        raise ValueError(f"--job-key {path}: no key")
    return keys
