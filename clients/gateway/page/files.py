"""The page's files, served as they are: HTML, style sheets, scripts."""

from __future__ import annotations

from functools import cache
from importlib import resources

from clients.gateway.endpoint import HttpCall
from clients.gateway.errors import HttpError

# Packages and content types of the files.
_FILES = {
    "page.html": ("clients.gateway.page", "text/html; charset=utf-8"),
    "icon.svg": ("clients.gateway.page", "image/svg+xml"),
    "page.css": ("clients.gateway.page", "text/css; charset=utf-8"),
    "colours.css": ("clients", "text/css; charset=utf-8"),
    **dict.fromkeys(
        ("access.js", "cluster.js", "elements.js", "names.js", "playground.js", "rates.js", "tables.js"),
        ("clients.gateway.page", "text/javascript; charset=utf-8"),
    ),
}
# Scripts and styles come from these files alone, and the page talks to the gateway that served it alone.
_HEADERS = (
    (
        "content-security-policy",
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("cache-control", "no-cache"),
    ("cross-origin-opener-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
)


async def page(call: HttpCall) -> None:
    """Answer with the page."""
    await _answer(call, "page.html")


async def page_file(call: HttpCall) -> None:
    """Answer with a file of the page. Raises HttpError."""
    await _answer(call, call.parameters["file"])


async def _answer(call: HttpCall, name: str) -> None:
    if name not in _FILES:
        raise HttpError(404, "unknown_path", f"{call.exchange.path[:200]}: no such path")
    _, kind = _FILES[name]
    await call.exchange.answer(_content(name), headers=_HEADERS, kind=kind)


@cache
def _content(name: str) -> bytes:
    package, _ = _FILES[name]
    return (resources.files(package) / name).read_bytes()
