"""Validates uploads in child processes, in turns of the tenants: hostile files end or hold up a child alone."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from adapter_store.convert import refusals
from adapter_store.storage import Upload
from adapter_store.validate import Validated, validate_adapter
from artifacts.base_model import HASH_ARCHITECTURE, BaseModel
from artifacts.errors import ArtifactError, MismatchError
from artifacts.revision import CONFIG_FILE, WEIGHTS_FILE, revision_digest
from rpc.children.pool import ChildDiedError, ChildPool
from rpc.errors import InvalidField

# Timeout in seconds for a child's answer, which reads gigabytes of weights from the disk.
WALL_S = 600.0


class Validator:
    """Checks the files of uploads. The first adapter of a base model other than the hash model starts a child."""

    def __init__(self) -> None:
        self._children = ChildPool("adapter_store.validator_child", "VALIDATOR_BUSY", wall_s=WALL_S)

    async def check(self, upload: Upload, weights_digest: str, base: BaseModel, tenant: str) -> tuple[Validated, str]:
        """Return what is accepted, and the digest of the revision that it is.

        Raises InvalidField for what is broken, Mismatch for what does not go with the base, or Unavailable.
        """
        if base.architecture == HASH_ARCHITECTURE:
            return await asyncio.to_thread(_check_any_bytes, upload, weights_digest, base)
        request = {
            "directory": str(upload.path.absolute()),
            "base": _fields(base),
            "weights": weights_digest,
            "bytes": upload.sizes[WEIGHTS_FILE],
        }
        try:
            answer = await self._children.ask(tenant, request)
        except ChildDiedError as error:
            message = f"the check of {CONFIG_FILE} and the header of {WEIGHTS_FILE} {error}"
            raise InvalidField("adapter", message, reason="ADAPTER_TOO_COSTLY") from None
        with refusals():
            if "error" in answer:
                kind = MismatchError if answer.get("mismatch") else ArtifactError
                raise kind(answer["subject"], answer["error"])
        config = answer["config"]
        return Validated(answer["rank"], None if config is None else config.encode()), answer["digest"]

    def close(self) -> None:
        """End the children."""
        self._children.close()


def _check_any_bytes(upload: Upload, weights_digest: str, base: BaseModel) -> tuple[Validated, str]:
    config = (upload.path / CONFIG_FILE).read_bytes()
    return validate_adapter(upload.path, base), revision_digest(config, weights_digest)


def _fields(base: BaseModel) -> Mapping[str, Any]:
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return fields | {"files": {}, "modules": [dataclasses.astuple(module) for module in base.modules]}
