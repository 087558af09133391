"""The hash model's spec: `hash:?vocab=32000&step_ms=5&seed=1&end_after=0&context=32768`.

The next token of its engine is a hash of all that the answer depends on, so that tests see every wrong token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.names import sha256_json

_PREFIX = "hash:"
# Minimum of each number that is not 0: a vocabulary has 256 ids of bytes, and as many others.
_LEAST = {"vocab": 512, "context": 2}
_LARGEST = 2**31 - 1
# Maximum of each number that need not be whole.
_MOST = {"step_ms": 60_000, "draft": 1}
# Numbers of an embedding.
VECTOR_SIZE = 16


@dataclass(frozen=True, slots=True)
class HashModel:
    """Settings of the hash model. `vocab` and `context` count tokens.

    A step takes `step_ms`. An answer ends by itself after `end_after` tokens; 0: never. Each token of a draft is right
    with probability `draft`; 0: no drafts. For tests of bad requests, a step whose input has the token `die_on` kills
    the engine process, and one with `hang_on` never ends.
    """

    vocab: int = 32_000
    step_ms: float = 0.0
    seed: int = 0
    end_after: int = 0
    context: int = 32_768
    die_on: int | None = None
    hang_on: int | None = None
    draft: float = 0.0

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Return the last id of the vocabulary if answers end by themselves, else nothing."""
        return (self.vocab - 1,) if self.end_after > 0 else ()

    @property
    def digest(self) -> str:
        """Return the digest of the settings that decide tokens: not step_ms, draft, die_on and hang_on."""
        manifest = {
            "architecture": "hash",
            "vocab": self.vocab,
            "seed": self.seed,
            "end_after": self.end_after,
            "context": self.context,
        }
        return sha256_json(manifest)


def is_hash_spec(text: str) -> bool:
    """Return whether a model setting names a hash model, not a directory."""
    return text.startswith(_PREFIX)


def parse_hash_model(spec: str) -> HashModel:
    """Parse a spec; missing keys have their defaults. Raises ArtifactError that names the key."""
    if not is_hash_spec(spec):
        raise ArtifactError("model", f"{spec!r} is not a hash model like hash:?vocab=32000&seed=1")
    query = spec.removeprefix(_PREFIX).removeprefix("?")
    values: dict[str, str] = {}
    for part in query.split("&") if query else ():
        pairs = parse_qsl(part, keep_blank_values=True)
        key, value = pairs[0] if pairs else ("", "")
        if key in values or key not in HashModel.__dataclass_fields__:
            what = "is given twice" if key in values else f"is not one of {', '.join(HashModel.__dataclass_fields__)}"
            raise ArtifactError("model", f"{spec!r}: {key!r} {what}")
        values[key] = value
    numbers: dict[str, Any] = {
        key: _number(spec, key, text) if key in _MOST else _whole(spec, key, text) for key, text in values.items()
    }
    return HashModel(**numbers)


def _whole(spec: str, key: str, text: str) -> int:
    least = _LEAST.get(key, 0)
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= _LARGEST):
        raise ArtifactError("model", f"{spec!r}: {key} must be a whole number from {least} to {_LARGEST}")
    return int(text)


def _number(spec: str, key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= _MOST[key]:
        raise ArtifactError("model", f"{spec!r}: {key} must be a number from 0 to {_MOST[key]}")
    return number
