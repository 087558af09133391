"""The hash model's spec: `hash:?vocab=32000&step_ms=5&seed=1&end_after=0&context=32768`.

Its engine's next token is a hash of everything that the answer depends on; see the design's section on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl

from artifacts.digests import sha256_json
from artifacts.errors import ArtifactError

_PREFIX = "hash:"
_SMALLEST_VOCAB = 512  # 256 bytes, and as many ids that are none
_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class HashModel:
    """`vocab` and `context` in tokens; `step_ms` is how long a step takes; an answer ends by itself after `end_after`
    tokens, never when 0. A step that has the token `die_on` among its inputs kills the engine process, one with
    `hang_on` never ends: for tests of what becomes of requests that do so.
    """

    vocab: int = 32_000
    step_ms: float = 0.0
    seed: int = 0
    end_after: int = 0
    context: int = 32_768
    die_on: int | None = None
    hang_on: int | None = None

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The last id of the vocabulary where answers end by themselves, else none."""
        return (self.vocab - 1,) if self.end_after > 0 else ()

    @property
    def digest(self) -> str:
        """Over what decides the tokens; `step_ms`, `die_on` and `hang_on` do not."""
        manifest = {
            "architecture": "hash",
            "vocab": self.vocab,
            "seed": self.seed,
            "end_after": self.end_after,
            "context": self.context,
        }
        return sha256_json(manifest)


def is_hash_spec(text: str) -> bool:
    """Whether a model setting means a hash model and not a directory."""
    return text.startswith(_PREFIX)


def parse_hash_model(spec: str) -> HashModel:
    """Read a spec; keys left out have their defaults. Raises ArtifactError that names the key."""
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
    return HashModel(
        vocab=_whole(spec, values, "vocab", HashModel().vocab, _SMALLEST_VOCAB),
        step_ms=_milliseconds(spec, values),
        seed=_whole(spec, values, "seed", 0, 0),
        end_after=_whole(spec, values, "end_after", 0, 0),
        context=_whole(spec, values, "context", HashModel().context, 2),
        die_on=_token(spec, values, "die_on"),
        hang_on=_token(spec, values, "hang_on"),
    )


def _whole(spec: str, values: dict[str, str], key: str, default: int, least: int) -> int:
    text = values.get(key, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= _LARGEST):
        raise ArtifactError("model", f"{spec!r}: {key} must be a whole number from {least} to {_LARGEST}")
    return int(text)


def _token(spec: str, values: dict[str, str], key: str) -> int | None:
    return _whole(spec, values, key, 0, 0) if key in values else None


def _milliseconds(spec: str, values: dict[str, str]) -> float:
    try:
        step_ms = float(values.get("step_ms", "0"))
    except ValueError:
        step_ms = -1.0
    if not 0 <= step_ms <= 60_000:
        raise ArtifactError("model", f"{spec!r}: step_ms must be a number from 0 to 60000")
    return step_ms
