"""The error of an adapter cache that contradicts itself."""

from __future__ import annotations


class AdapterIntegrityError(Exception):
    """The parts of the adapter cache do not agree; going on would compute sequences with the wrong adapter."""


def require_integrity(holds: bool, message: str) -> None:
    """Raise AdapterIntegrityError with the message unless `holds`."""
    if not holds:
        raise AdapterIntegrityError(message)
