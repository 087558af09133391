"""The tokenizer of a base model as one zip, which gateways read; the files are those of the model's manifest."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator, Mapping
from typing import Any

from smg_grpc_proto.generated import common_pb2 as common

from router.catalog.manifest import Manifest
from rpc.errors import Mismatch

TOKENIZER_FILE = "tokenizer.json"
# Bytes of a message's part of the zip, as other engines of this protocol send.
_CHUNK_BYTES = 64 * 1024


class TokenizerFiles:
    """Makes the zips, and keeps the last one: a router has few models."""

    def __init__(self) -> None:
        # The digest of a model, its zip, and the zip's sha256; one is made at a time.
        self._kept = ("", b"", "")
        self._making = asyncio.Lock()

    async def chunks(self, manifest: Manifest) -> AsyncIterator[Any]:
        """Yield the zip in parts, its sha256 with the last. Raises Mismatch for a model without a tokenizer."""
        if TOKENIZER_FILE not in manifest.files:
            message = f"the model has no {TOKENIZER_FILE}; give the gateway a tokenizer of its own"
            raise Mismatch(manifest.name, message, reason="NO_TOKENIZER")
        async with self._making:
            if self._kept[0] != manifest.digest:
                # In a thread: large vocabularies take a second.
                self._kept = (manifest.digest, *await asyncio.to_thread(_zipped, manifest.files))
            _, whole, sha256 = self._kept
        for start in range(0, len(whole), _CHUNK_BYTES):
            last = start + _CHUNK_BYTES >= len(whole)
            yield common.GetTokenizerChunk(data=whole[start : start + _CHUNK_BYTES], sha256=sha256 if last else "")


def _zipped(files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """Return a zip that is the same for the same files, and its sha256."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, files[name])
    return buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest()
