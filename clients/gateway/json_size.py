"""Counts what a JSON text has before it is parsed: four megabytes of small objects and lists take seconds.

A text of the same size takes milliseconds, whatever characters it has, and a million numbers a tenth of a second.
"""

from __future__ import annotations

from clients.gateway.errors import HttpError

# Maximum number of objects and lists of a body, of strings, names of fields included, and of all values: about 0.1 s of
# parsing for each. Routers take messages of 10,000 fields, and a list of numbers is one.
CONTAINERS, STRINGS, VALUES = 20_000, 100_000, 1_000_000


def check_json_size(body: bytes) -> None:
    """Raise HttpError where a JSON text has more values than are parsed."""
    if body.count(b'"') > 2 * STRINGS:
        body = _without_escapes(body)
        if body.count(b'"') > 2 * STRINGS:
            raise _too_many(STRINGS, "strings")
    if _containers(body) <= CONTAINERS and body.count(b",") < VALUES:
        return
    # Count again without the characters of strings: between quotes, every other piece is outside of strings.
    body = b"".join(_without_escapes(body).split(b'"')[::2])
    if _containers(body) > CONTAINERS:
        raise _too_many(CONTAINERS, "objects and lists")
    if body.count(b",") >= VALUES:
        raise _too_many(VALUES, "values")


def _without_escapes(body: bytes) -> bytes:
    """Return a JSON text whose quotes are the ends of strings alone."""
    return body.replace(rb"\\", b"").replace(rb"\"", b"")


def _containers(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")


def _too_many(most: int, what: str) -> HttpError:
    return HttpError(400, "invalid_json", f"the body has more than {most} {what}")
