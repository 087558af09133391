"""`loraplex adapters alias`, `rollback` and `download`: which revision requests get, and its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.adapter_commands import NameArgument
from clients.cli.options import STORE, TENANT, StoreOption, TenantOption
from clients.cli.store import store_client
from clients.cli.terminal import CommandError, out

if TYPE_CHECKING:
    from loraplex_client import Adapter, Revision, StoreClient

AliasArgument = Annotated[str, typer.Argument(metavar="ALIAS", help="live, or a name such as canary.")]


def alias(
    name: NameArgument,
    alias: AliasArgument,
    revision: Annotated[
        str, typer.Argument(metavar="REVISION", help="sha256:... of the revision, its first digits, or another alias.")
    ] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias.")] = False,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Move an alias of an adapter to a revision, or remove it. Requests that run keep theirs.

    [bold]loraplex adapters alias support live canary --tenant acme[/]
    """
    if remove == bool(revision):
        raise CommandError("give a REVISION, or --remove")
    with store_client(store, tenant) as client:
        adapter, revisions = look_up(client, name)
        digest = "" if remove else adapter.aliases.get(revision) or _whole(revisions, revision)
        client.set_alias(adapter.name, alias, digest)
    out().print(f"{adapter.name}: {alias} {f'is {digest}' if digest else 'is removed'}", markup=False, soft_wrap=True)


def rollback(name: NameArgument, tenant: TenantOption = TENANT, store: StoreOption = STORE) -> None:
    """Move `live` to the revision that was uploaded before the present one."""
    with store_client(store, tenant) as client:
        adapter, revisions = look_up(client, name)
        live = adapter.aliases.get("live")
        if live is None:
            raise CommandError(f"{adapter.name} has no alias live")
        digests = [revision.digest for revision in revisions]
        older = digests[digests.index(live) + 1 :]
        if not older:
            raise CommandError(f"{adapter.name}: {live[:19]} is its first revision: there is none before it")
        client.set_alias(adapter.name, "live", older[0])
    out().print(f"{adapter.name}: live moved from {live[:19]} to {older[0]}", markup=False, soft_wrap=True)


def download(
    name: NameArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory for the two files; made if needed.")],
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Write an adapter's configuration and weights to a directory, as peft reads them.

    [bold]loraplex adapters download support@canary ./support --tenant acme[/]
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CommandError(f"{directory} exists and is not an empty directory")
    with store_client(store, tenant) as client:
        revision = client.download(name, directory)
    out().print(f"{directory}: {revision.name}", markup=False, soft_wrap=True)


def look_up(client: StoreClient, name: str) -> tuple[Adapter, tuple[Revision, ...]]:
    """Return an adapter, which may lack the alias live, and its revisions, newest first."""
    revisions = client.revisions(name)
    adapter, _ = client.get(f"{name}@{revisions[0].digest}")
    return adapter, revisions


def _whole(revisions: Sequence[Revision], text: str) -> str:
    """Return the only digest that begins with `text`. Raises CommandError."""
    found = [one.digest for one in revisions if one.digest.startswith((text, f"sha256:{text}"))]
    if len(found) != 1:
        raise CommandError(f"{text} is {'the beginning of several revisions' if found else 'no alias and no revision'}")
    return found[0]
