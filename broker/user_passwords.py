"""Passwords of Redis's users in files that only their owner may read: NAME/password, the former password below it.

Each file has a folder of its own, because a container that mounts a file does not see the one that replaces it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

Passwords = Mapping[str, Sequence[str]]

# Random bytes of a password: nobody can guess it, so that the server may keep it as a plain hash.
_BYTES = 32


def password_path(directory: Path, user: str) -> Path:
    """Return the file of a user's password."""
    return directory / user / "password"


def read_passwords(directory: Path, users: Sequence[str]) -> dict[str, list[str]]:
    """Return the users' valid passwords, the present one first; those without a file get a new one."""
    found: dict[str, list[str]] = {}
    for user in users:
        path = password_path(directory, user)
        found[user] = path.read_text().split() if path.exists() else [_new()]
    return found


def rotated(passwords: Passwords) -> dict[str, list[str]]:
    """Return a new password of each user, and its present one, which stays valid until the next rotation."""
    return {user: [_new(), *present[:1]] for user, present in passwords.items()}


def write_passwords(directory: Path, passwords: Passwords) -> None:
    """Write the files, each as a whole. Raises OSError."""
    for user, lines in passwords.items():
        path = password_path(directory, user)
        for folder in (directory, path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write("".join(f"{line}\n" for line in lines))
        part.replace(path)


def _new() -> str:
    return secrets.token_urlsafe(_BYTES)
