"""Adapters and base models as the store keeps them: names, digests, files, manifests, and what is served. No torch."""

from __future__ import annotations

from typing import Any

from loraplex.runtime import json_object


class ArtifactError(Exception):
    """A broken or missing file, bad JSON, a bad name. `subject` is the file or field at fault."""

    def __init__(self, subject: str, message: str) -> None:
        super().__init__(f"{subject}: {message}")
        self.subject = subject
        self.message = message


class MismatchError(ArtifactError):
    """An artifact that is readable but not served: another base, shapes or rank, an unsupported PEFT field."""


def parse_object(data: bytes, subject: str, values: int = json_object.VALUES) -> dict[str, Any]:
    """Parse a JSON object strictly: every process accepts and refuses the same bytes. Raises ArtifactError."""
    try:
        return json_object.parse_object(data, values)
    except ValueError as error:
        raise ArtifactError(subject, str(error)) from error
