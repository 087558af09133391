"""The characters of request ids, which stand in log lines, traces and tables."""

from __future__ import annotations

import re

from rpc.errors import InvalidField

REQUEST_ID_CHARACTERS = 128
# No spaces, no control characters, nothing that needs quotes.
_REQUEST_ID = re.compile(rf"[A-Za-z0-9._:/@+=~-]{{0,{REQUEST_ID_CHARACTERS}}}")


def read_request_id(request_id: str) -> str:
    """Return a client's request id, which may be empty. Raises InvalidField."""
    if not _REQUEST_ID.fullmatch(request_id):
        message = f"not {REQUEST_ID_CHARACTERS} characters at most of A-Z a-z 0-9 . _ : / @ + = ~ -"
        raise InvalidField("request_id", message)
    return request_id
