"""Loads the tokenizers of base models, each tried out in a child process first; those that end it are kept away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from artifacts.digests import sha256_bytes, sha256_json
from router.catalog.manifest import Manifest
from router.text.panics import panics_as_errors
from router.text.text import Text
from router.text.tokenizer import text_of
from rpc.children.pool import ChildDiedError, ChildPool

log = logging.getLogger(__name__)

# Timeout in seconds for a child, which may take 20 s of processor time.
WALL_S = 120.0
# Interval in seconds between looks whether other files were registered for a model whose files were refused.
LOOK_AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class _Refusal:
    name: str
    files: str
    why: str
    look_again_at: float


class ModelTexts:
    """The tokenizers of a router's base models."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._children = ChildPool("router.text.tokenizer_child", "TOKENIZER_BUSY", children=1, wall_s=WALL_S)
        # By the digest of the base model.
        self._refused: dict[str, _Refusal] = {}

    @property
    def refusals(self) -> list[str]:
        """Return the models that cannot be served, and why."""
        return [f"{refusal.name} ({refusal.why})" for refusal in self._refused.values()]

    def is_refused(self, digest: str) -> bool:
        """Tell whether a model's files were refused a moment ago."""
        return digest in self._refused and self._clock() < self._refused[digest].look_again_at

    async def load(self, manifest: Manifest) -> Text | None:
        """Return a model's tokenizer; None where its files cannot be used, which is logged once.

        Raises Unavailable on a machine without time for it.
        """
        files = sha256_json({name: sha256_bytes(data) for name, data in manifest.files.items()})
        former = self._refused.get(manifest.digest)
        if former is None or former.files != files:
            why = await self._why_unusable(manifest.files)
            if not why:
                try:
                    text = await asyncio.to_thread(_load, manifest)
                    self._refused.pop(manifest.digest, None)
                    return text
                except Exception as error:  # anybody may have written the files: the other models go on
                    why = f"{type(error).__name__}: {error}"
            log.warning("base model %s can't be served, its tokenizer files %s", manifest.name, why)
        else:
            why = former.why
        self._refused[manifest.digest] = _Refusal(manifest.name, files, why, self._clock() + LOOK_AGAIN_S)
        return None

    async def _why_unusable(self, files: Mapping[str, bytes]) -> str:
        if "tokenizer.json" not in files:
            return ""
        try:
            texts = {name: data.decode() for name, data in files.items()}
        except UnicodeDecodeError:
            return "are not UTF-8"
        try:
            return str((await self._children.ask("", {"files": texts})).get("error", ""))
        except ChildDiedError as error:
            return f"ended the process that tried them out: it {error}"


def _load(manifest: Manifest) -> Text:
    with panics_as_errors():
        return text_of(manifest.architecture, manifest.files)
