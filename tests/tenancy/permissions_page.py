"""Writes docs/reference/permissions.md from the table in tenancy/permissions.py."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from loraplex.runtime.tenancy.permissions import PERMISSIONS, Permission, Port

_HEAD = """# Permissions

The roles that may call each RPC, by port. Any other call gets PERMISSION_DENIED.

- **Ports.** `public` is for tenants, `operators` for operators and the cluster's processes, `relay` for workers and
  other routers. Without credentials one port serves all, and every caller has every role.
- **Scopes**, in brackets: a key or token that has scopes may call only their methods. `generate` includes `tokenize`.
- **Workers** call DownloadRevision with a router's grant.
- **ExternalScaler** has its own port, without credentials, because KEDA sends none. With TLS it asks for a certificate.
"""


def page() -> str:
    """Return the page: a line for the RPCs of a service that have the same permission."""
    parts = []
    for service, methods in groupby(PERMISSIONS.items(), key=lambda item: item[0].split("/")[1]):
        names: dict[str, list[str]] = {}
        for name, permission in methods:
            names.setdefault(_callers(permission), []).append(name.rpartition("/")[2])
        parts.append(f"\n**{service}**\n\n")
        parts += [f"- {', '.join(of)}{callers}\n" for callers, of in names.items()]
    return _HEAD + "".join(parts)


def _callers(row: Permission) -> str:
    if row.anybody:
        return ": anybody"
    roles = [f"{port.name.lower()}: {', '.join(sorted(of))}" for port in Port if (of := row.roles.get(port, ()))]
    return f" ({row.scope}): {'; '.join(roles)}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
