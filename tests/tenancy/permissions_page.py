"""Writes docs/reference/permissions.md from the table in tenancy/permissions.py."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from tenancy.permissions import PERMISSIONS, Permission, Port

_HEAD = """# Permissions: who may call what

This page lists every RPC of the cluster and the roles that may call it, by port. It is made from
[tenancy/permissions.py](../../tenancy/permissions.py); a test compares the two. After a change of the table
write the page again:

    .venv/bin/python -m tests.tenancy.permissions_page docs/reference/permissions.md

- **Default deny.** A server with a method that has no row does not start. A role that a row does not list for the port
  is refused with PERMISSION_DENIED.
- **Ports.** `public` is for tenants, `operators` for operators and the parts of the cluster, `relay` for workers and
  other routers.
- **Workers** call DownloadRevision with a router's grant for the revision
  ([adapter_store/service.py](../../adapter_store/service.py)).
- **ExternalScaler** is served by `loraplex scaler` on a port of its own, because KEDA sends no credential. With TLS
  that port asks for a certificate.
- **Scopes.** A key or token with scopes may call only the methods of these scopes, as far as its role may.
- **Without credentials** (on loopback, or with `--insecure-tenants`) one port serves the first two columns, and every
  caller has every role.
"""


def page() -> str:
    """Return the page."""
    parts = [_HEAD]
    for service, methods in groupby(PERMISSIONS.items(), key=lambda item: item[0].split("/")[1]):
        parts.append(f"## {service.rpartition('.')[2]}\n")
        parts.append(f"`{service}`\n")
        parts.append("| RPC | scope | public port | operators' port | relay port |\n| --- | --- | --- | --- | --- |")
        parts += [_row(name.rpartition("/")[2], row) for name, row in methods]
        parts.append("")
    return "\n".join(parts)


def _row(name: str, row: Permission) -> str:
    cells = [_cell(row, port) for port in Port]
    return f"| {name} | {row.scope or '-'} | {' | '.join(cells)} |"


def _cell(row: Permission, port: Port) -> str:
    return "anybody" if row.anybody else ", ".join(sorted(row.roles.get(port, ()))) or "-"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
