"""Directories of adapters, TENANT/NAME/ for a tenant's and NAME/ for shared ones, and their upload: what the store has
stays as it is, and no request's adapter changes unasked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraplex.cli.options import STORE, StoreOption
from loraplex.cli.service import explain
from loraplex.cli.terminal import Activity, CommandError, print_error, say
from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.names import SHARED, parse_adapter_name, sha256_file
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE, revision_digest

if TYPE_CHECKING:
    from loraplex_client import Adapter, AsyncStoreClient

LIVE = "live"
# The flag that names a directory of adapters.
FLAG = "--adapters"
# Alias of an upload that moves no alias.
_NONE = "-"


@dataclass(frozen=True)
class AdapterDirectory:
    """A peft adapter on disk, and the tenant that will own it."""

    tenant: str
    name: str
    directory: Path


@dataclass(frozen=True)
class AdapterTree:
    """The adapters below a directory by tenant and name, and a line for each entry that is not an adapter."""

    adapters: tuple[AdapterDirectory, ...] = ()
    faults: tuple[str, ...] = ()


def find_adapters(root: Path) -> AdapterTree:
    """Look for adapters below `root`. Raises CommandError where it has none that can be uploaded."""
    if not root.is_dir():
        raise CommandError(f"--adapters: {root} {'is not a directory' if root.exists() else 'does not exist'}")
    if (root / CONFIG_FILE).exists():
        raise CommandError(f"--adapters: {root} is an adapter itself; give its parent directory")
    directories: list[AdapterDirectory] = []
    faults: list[str] = []

    def take(tenant: str, directory: Path) -> None:
        try:
            directories.append(checked_adapter(tenant, directory.name, directory))
        except CommandError as error:
            faults.append(str(error))

    for child in _directories(root, faults):
        if (child / CONFIG_FILE).exists():
            take(SHARED, child)
            continue
        below = _directories(child, faults)
        for grandchild in below:
            take(child.name, grandchild)
        if not below:
            faults.append(f"--adapters: {child} is not an adapter, and holds none: it has no {CONFIG_FILE}")
    if not directories:
        none = f"--adapters: {root} holds no adapters: no NAME/{CONFIG_FILE}, no TENANT/NAME/{CONFIG_FILE}"
        raise CommandError("; ".join(faults) or none)
    return AdapterTree(tuple(sorted(directories, key=lambda adapter: (adapter.tenant, adapter.name))), tuple(faults))


def _directories(parent: Path, faults: list[str]) -> list[Path]:
    """Return the directories directly below `parent`, by name; links become faults."""
    directories = []
    for path in sorted(path for path in parent.iterdir() if not path.name.startswith(".")):
        try:
            _check_no_link(path, FLAG)
        except CommandError as error:
            faults.append(str(error))
            continue
        if path.is_dir():
            directories.append(path)
    return directories


def _check_no_link(path: Path, at: str) -> None:
    """Raise CommandError for a symbolic link: who may write to the directory could upload any file with it."""
    if path.is_symlink():
        raise CommandError(f"{at}: {path} is a symbolic link, and links are not followed; copy what it names")


def checked_adapter(tenant: str, name: str, directory: Path, at: str = FLAG) -> AdapterDirectory:
    """Return a directory as an adapter. Raises CommandError that names `at` where it is none, or its name is bad."""
    from loraplex_client.adapter_directory import why_no_adapter  # it imports gRPC

    for part in (CONFIG_FILE, WEIGHTS_FILE):
        _check_no_link(directory / part, at)
    if why := why_no_adapter(directory):
        raise CommandError(f"{at}: {directory} {why}")
    try:
        parsed = parse_adapter_name(f"tenants/{tenant}/adapters/{name}", tenant)
    except ArtifactError as error:
        raise CommandError(f"{at}: {directory}: {error}") from error
    return AdapterDirectory(parsed.tenant, parsed.adapter, directory)


def push_all(
    root: Annotated[
        Path, typer.Argument(metavar="DIR", help="Adapters in DIR/TENANT/NAME/; shared adapters in DIR/NAME/.")
    ],
    model: Annotated[str, typer.Option(metavar="NAME", help="Their base model, needed if the store has several.")] = "",
    update: Annotated[bool, typer.Option("--update", help="Make changed adapters of the directory live.")] = False,
    store: StoreOption = STORE,
) -> None:
    """Upload the adapters of a directory that the store lacks; report and skip bad ones."""
    from loraplex_client import LoraplexError

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
) -> int:
    """Upload the adapters of a base model as revisions; print a line for each fault, and for what has changed.

    `live` moves to the revision of an adapter that has no `live` yet, and of every adapter with `update`. `step` gets
    the progress. Returns the number of adapters that changed. Raises LoraplexError where no store answers, CommandError
    where no adapter of the tree is left.
    """
    from loraplex_client import AsyncStoreClient, LoraplexError, UnavailableError

    async with AsyncStoreClient(store) as client:
        bases = {model.name: model.digest for model in await client.models()}
    if base_model and base_model not in bases:
        raise CommandError(f"base model not found: {base_model}; `loraplex models list` shows what is registered")
    refused, changed = [], 0
    for tenant, owned in groupby(tree.adapters, key=lambda adapter: adapter.tenant):
        async with AsyncStoreClient(store, tenant) as client:
            for adapter in owned:
                try:
                    uploaded = False
                    stored = await _in_store(client, adapter, {base_model: bases[base_model]} if base_model else bases)
                    if stored is None:
                        step(f"uploading adapter {tenant}/{adapter.name}")
                        pushed = await client.push(adapter.directory, adapter.name, base_model=base_model, alias=_NONE)
                        stored, uploaded = (pushed.adapter, pushed.revision.digest), pushed.created
                        for warning in pushed.warnings if uploaded else ():
                            say(f"{tenant}/{adapter.name}: {warning}")
                    moved = await _make_live(client, *stored, update=update)
                    changed += uploaded or moved
                except UnavailableError:
                    raise
                except LoraplexError as error:
                    refused.append(f"--adapters: {adapter.directory}: {explain(error, 'store', store)}")
                except OSError as error:
                    refused.append(f"--adapters: {error.filename}: {error.strerror}")
    none_left = bool(tree.adapters) and len(refused) == len(tree.adapters)
    for fault in (*tree.faults, *refused):
        print_error(fault if none_left else f"{fault}; the others are served")
    if none_left:
        raise CommandError(f"none of {len(refused)} adapters was uploaded")
    return changed


async def _in_store(
    client: AsyncStoreClient, local: AdapterDirectory, bases: Mapping[str, str]
) -> tuple[Adapter, str] | None:
    """Return the adapter and the digest of a directory's revision, if the store has it for one of the base models.

    `bases` are the digests of the models as they are now, by name. Raises LoraplexError, OSError.
    """
    from loraplex_client import NotFoundError
    from loraplex_client.adapter_directory import read_config

    weights = await asyncio.to_thread(sha256_file, local.directory / WEIGHTS_FILE)
    digest = revision_digest(read_config(local.directory, tokens=False), weights)
    try:
        adapter, revision = await client.get(f"tenants/{local.tenant}/adapters/{local.name}@{digest}")
    except NotFoundError:
        return None
    return (adapter, digest) if bases.get(revision.base_model) == revision.base_digest else None


async def _make_live(client: AsyncStoreClient, adapter: Adapter, digest: str, *, update: bool) -> bool:
    """Move `live` to an uploaded revision, unless it names another one and `update` is false; tell whether it moved."""
    name, before = adapter.name, adapter.aliases.get(LIVE)
    if before == digest:
        return False
    if before is not None and not update:
        say(
            f"{name}: {LIVE} stays at {before[:19]}, and the directory's {digest[:19]} is in the store beside it; "
            f"loraplex adapters alias {name} {LIVE} {digest} moves it, --update moves all"
        )
        return False
    await client.set_alias(name, LIVE, digest)
    if before is not None:
        say(f"{name}: {LIVE} moved from {before[:19]} to {digest[:19]}")
    return True
