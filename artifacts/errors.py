"""The two errors of this room; callers turn them into their own (a start-up line, a gRPC status)."""

from __future__ import annotations


class ArtifactError(Exception):
    """Bad input: a broken or missing file, bad JSON, a bad name. `subject` is the file or field at fault."""

    def __init__(self, subject: str, message: str) -> None:
        super().__init__(f"{subject}: {message}")
        self.subject = subject
        self.message = message


class MismatchError(ArtifactError):
    """Readable, but does not go with the base model: another base, shapes, a rank, a PEFT field that is not served."""
