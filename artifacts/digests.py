"""Digests as names, manifests and messages write them: `sha256:` and 64 lower-case hexadecimal digits."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# Size in bytes of the pieces in which a file is read.
_READ_BYTES = 1 << 20


def sha256_bytes(data: bytes) -> str:
    """Return the digest of bytes."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def sha256_file(path: str | Path) -> str:
    """Return the digest of a file's bytes. Raises OSError."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_READ_BYTES):
            sha256.update(piece)
    return PREFIX + sha256.hexdigest()


def sha256_json(value: Any) -> str:
    """Return the digest of a value's JSON: sorted keys, no spaces, ASCII. Raises ValueError on NaN and infinity."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return sha256_bytes(text.encode("ascii"))


def weighted_digest(parts: Iterable[tuple[str, float]]) -> str:
    """Return the digest of a weighted set of adapters: over its sorted (digest, weight) pairs.

    Weights are rounded to 32 bits, as on the wire. Raises ValueError on NaN and infinity.
    """
    pairs = sorted([digest, array("f", [weight])[0]] for digest, weight in parts)
    return sha256_json({"format": 1, "weighted": pairs})


def is_digest(text: str) -> bool:
    """Return whether the text is a digest."""
    return _DIGEST.fullmatch(text) is not None
