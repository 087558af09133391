"""Names by which a gateway without credentials is called, so that pages of other sites do not reach it.

A page in a browser of this machine reaches loopback: under a name of its own site that it lets resolve to 127.0.0.1
(DNS rebinding), and with blind requests, whose answers it cannot read. The header Host shows the first, Origin both.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from clients.gateway.errors import HttpError
from clients.gateway.settings import Settings
from rpc.identity.tenant_header import is_loopback

# Maximum length in characters of a header that an error shows.
_SHOWN = 100


def own_names(settings: Settings) -> OwnNames | None:
    """Return the names of a gateway; None where any is served: callers prove who they are, or may be anywhere."""
    names = [name.strip().lower() for name in settings.host_names.split(",") if name.strip()]
    if settings.ca or not (names or is_loopback(settings.host)):
        return None
    return OwnNames(names)


class OwnNames:
    """The names of a gateway, beside localhost and all addresses: an address cannot be made to mean another one."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def check(self, headers: Headers) -> None:
        """Raise HttpError for a request that a page of another site may have made."""
        hosts = headers.getlist("host")
        for host in hosts:
            name = _name(f"//{host}")
            if not (self._is_own(name) or _is_address(name)):
                raise HttpError(
                    403,
                    "host_not_allowed",
                    f"host: {host[:_SHOWN]!r} is no name of this gateway; if it should be, start it with --host-names",
                    "host",
                )
        for origin in headers.getlist("origin"):
            scheme, _, rest = origin.partition("://")
            # Programs with a browser inside have schemes of their own; `null` is a page that hides its site.
            if scheme in ("http", "https", "null") and rest not in hosts and not self._is_own(_name(origin)):
                site = f"a page of {origin[:_SHOWN]}"
                message = f"origin: {site} may not call this gateway; if it should, start it with --host-names"
                raise HttpError(403, "origin_not_allowed", message, "origin")

    def _is_own(self, name: str) -> bool:
        return name in self._names or is_loopback(name) or name.endswith(".localhost")


def _name(address: str) -> str:
    """Return the name or address of a URL, without its port; empty for none."""
    try:
        return (urlsplit(address).hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
