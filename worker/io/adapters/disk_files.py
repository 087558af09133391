"""The directory of the disk tier: its lock, and the complete revisions that a start finds in it.

DIR/lock             locked while a worker uses the directory
DIR/sha256-.../      a complete revision, made and removed by one rename
DIR/partial-.../     being written or removed; those of a killed worker are removed at the start
"""

from __future__ import annotations

import fcntl
import re
import secrets
import shutil
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from artifacts.errors import ArtifactError
from artifacts.revision import CONFIG_FILE, WEIGHTS_FILE

_PARTIAL = "partial-"
_REVISION = re.compile(r"sha256-[0-9a-f]{64}")


@dataclass(slots=True)
class Stored:
    """A complete revision. One that was found at the start is verified at its first use."""

    path: Path
    size: int
    verified: bool


def lock_directory(directory: Path) -> IO[bytes]:
    """Make a directory and lock it until the returned file is closed. Raises ArtifactError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("ab")
    except OSError as error:
        raise ArtifactError(str(directory), f"adapters can't be kept here: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ArtifactError(
            str(directory), "another worker keeps its adapters here; give each a --cache-dir of its own"
        ) from error
    return lock


def find_revisions(directory: Path) -> OrderedDict[str, Stored]:
    """Return complete revisions by digest, the least recently used first; removes what a killed worker left."""
    for partial in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)
    found: list[tuple[float, str, Stored]] = []
    for path in directory.iterdir():
        if not _REVISION.fullmatch(path.name):
            continue
        if is_complete(path):
            size = sum((path / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE))
            found.append((path.stat().st_mtime, path.name.replace("-", ":"), Stored(path, size, verified=False)))
        else:
            shutil.rmtree(path, ignore_errors=True)
    return OrderedDict((digest, stored) for _, digest, stored in sorted(found, key=lambda entry: entry[:2]))


def is_complete(revision: Path) -> bool:
    """Return whether a revision's directory has its files."""
    return all((revision / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE))


def revision_path(directory: Path, digest: str) -> Path:
    """Return the place of a complete revision."""
    return directory / digest.replace(":", "-")


def new_partial(directory: Path) -> Path:
    """Return the path of a directory for what is being written or removed; it is not made yet."""
    return directory / f"{_PARTIAL}{secrets.token_hex(8)}"
