"""Uploads the adapters of a directory: what the store has stays as it is, and no request's adapter changes unasked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.digests import sha256_file
from artifacts.revision import WEIGHTS_FILE, revision_digest
from clients.cli.adapter_tree import AdapterDirectory, AdapterTree, find_adapters
from clients.cli.options import STORE, StoreOption
from clients.cli.terminal import Activity, CommandError, out, print_error

if TYPE_CHECKING:
    from loraplex_client import Adapter, AsyncStoreClient

LIVE = "live"
# Alias of an upload that moves no alias.
_NONE = "-"


def push_all(
    root: Annotated[
        Path, typer.Argument(metavar="DIR", help="Adapters in DIR/TENANT/NAME/; shared adapters in DIR/NAME/.")
    ],
    model: Annotated[str, typer.Option(metavar="NAME", help="Their base model, needed if the store has several.")] = "",
    update: Annotated[
        bool, typer.Option("--update", help="Move `live` of adapters that the store has to the directory's revisions.")
    ] = False,
    store: StoreOption = STORE,
) -> None:
    """Upload the adapters of a directory that the store has not; a bad one is named, and the others are uploaded."""
    from loraplex_client import LoraplexError

    from clients.cli.failures import explain

    with Activity() as activity:
        try:
            asyncio.run(upload_tree(store, find_adapters(root), model, update=update, step=activity.step))
        except LoraplexError as error:
            raise explain(error, "store", store) from error


async def upload_tree(
    store: str,
    tree: AdapterTree,
    base_model: str,
    *,
    update: bool,
    step: Callable[[str], None],
) -> None:
    """Upload the adapters of a base model as revisions; print a line for each fault, and for what has changed.

    `live` moves to the revision of an adapter that has no `live` yet, and of every adapter with `update`. `step` gets
    the progress. Raises LoraplexError where no store answers, CommandError where no adapter of the tree is left.
    """
    from loraplex_client import AsyncStoreClient, LoraplexError, UnavailableError

    from clients.cli.failures import explain

    async with AsyncStoreClient(store) as client:
        bases = {model.name: model.digest for model in await client.models()}
    if base_model and base_model not in bases:
        raise CommandError(f"base model not found: {base_model}; `loraplex models list` shows what is registered")
    refused = []
    for tenant, owned in groupby(tree.adapters, key=lambda adapter: adapter.tenant):
        async with AsyncStoreClient(store, tenant) as client:
            for adapter in owned:
                try:
                    found = await _in_store(client, adapter, {base_model: bases[base_model]} if base_model else bases)
                    if found is None:
                        step(f"uploading adapter {tenant}/{adapter.name}")
                        pushed = await client.push(adapter.directory, adapter.name, base_model=base_model, alias=_NONE)
                        found = pushed.adapter, pushed.revision.digest
                    await _make_live(client, *found, update=update)
                except UnavailableError:
                    raise
                except OSError as error:
                    refused.append(f"--adapters: {error.filename}: {error.strerror}")
                except LoraplexError as error:
                    refused.append(f"--adapters: {adapter.directory}: {explain(error, 'store', store)}")
    none_left = bool(tree.adapters) and len(refused) == len(tree.adapters)
    for fault in (*tree.faults, *refused):
        print_error(fault if none_left else f"{fault}; the others are served")
    if none_left:
        raise CommandError(f"none of {len(refused)} adapters was uploaded")


async def _in_store(
    client: AsyncStoreClient, local: AdapterDirectory, bases: Mapping[str, str]
) -> tuple[Adapter, str] | None:
    """Return the adapter and the digest of a directory's revision, if the store has it for one of the base models.

    `bases` are the digests of the models as they are now, by name. Raises LoraplexError, OSError.
    """
    from loraplex_client import NotFoundError
    from loraplex_client.adapters import read_config

    weights = await asyncio.to_thread(sha256_file, local.directory / WEIGHTS_FILE)
    digest = revision_digest(read_config(local.directory), weights)
    try:
        adapter, revision = await client.get(f"tenants/{local.tenant}/adapters/{local.name}@{digest}")
    except NotFoundError:
        return None
    return (adapter, digest) if bases.get(revision.base_model) == revision.base_digest else None


async def _make_live(client: AsyncStoreClient, adapter: Adapter, digest: str, *, update: bool) -> None:
    """Move `live` to an uploaded revision, unless it names another one and `update` is false."""
    name, before = adapter.name, adapter.aliases.get(LIVE)
    if before == digest:
        return
    if before is not None and not update:
        _say(
            f"{name}: {LIVE} stays at {before[:19]}, and the directory's {digest[:19]} is in the store beside it; "
            f"loraplex adapters alias {name} {LIVE} {digest} moves it, --update moves all"
        )
        return
    await client.set_alias(name, LIVE, digest)
    if before is not None:
        _say(f"{name}: {LIVE} moved from {before[:19]} to {digest[:19]}")


def _say(line: str) -> None:
    out().print(line, markup=False, soft_wrap=True)
