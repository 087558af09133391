"""`loraplex adapters`: a tenant's adapters in the adapter store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.adapter_commands import NameArgument, pin, unpin, warm
from clients.cli.adapters_top import adapters_top
from clients.cli.aliases import alias, download, look_up, rollback
from clients.cli.certificates import (
    ModelDirOption,
    certificate_json,
    certify,
    certify_revision,
    print_certificates,
)
from clients.cli.grants import grant, grants, ungrant
from clients.cli.options import STORE, TENANT, JsonOption, StoreOption, TenantOption
from clients.cli.store import store_client
from clients.cli.terminal import CommandError, err, out, print_fields, print_json, print_rows
from clients.cli.upload_tree import push_all

if TYPE_CHECKING:
    from loraplex_client import Adapter, Revision
    from loraplex_client.adapters import Progress

# Flags that fill the fields of an upload's header.
_HEADER_FLAGS = {"header.adapter": "--name", "header.alias": "--alias", "header.base_model": "--model"}

app = typer.Typer(
    no_args_is_help=True,
    help="Push, list, show and delete a tenant's adapters; show and control where workers keep them.",
)


@app.command()
def push(  # noqa: PLR0913, PLR0917  # one parameter a flag
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A peft adapter: its configuration and safetensors.")
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name that requests use.")],
    tenant: TenantOption = TENANT,
    model: Annotated[str, typer.Option(metavar="NAME", help="Its base model, needed if the store has several.")] = "",
    alias: Annotated[
        str, typer.Option(metavar="ALIAS", help="Alias to move to this revision: `live` by default, `-` for none.")
    ] = "",
    certify_for: Annotated[
        str,
        typer.Option(
            "--certify",
            metavar="SCHEME",
            help="Measure it on a base that is quantized so, such as int8, before the alias moves; needs --model-dir.",
        ),
    ] = "",
    model_dir: ModelDirOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Upload an adapter as a new revision, and make it the one that requests get.

    [bold]loraplex adapters push ./support-lora --name support --tenant acme[/]
    """
    if certify_for and model_dir is None:
        raise CommandError("--certify: give the directory of the base model with --model-dir")
    with store_client(store, tenant) as client:
        with _progress_bar(f"{directory}") as progress:
            first = "-" if certify_for else alias
            with _named_by_flags():
                pushed = client.push(directory, name, base_model=model, alias=first, progress=progress)
        if certify_for and model_dir is not None:
            certificate = certify_revision(client, pushed.revision, certify_for, model_dir)
            if certificate.verdict == "refused":
                raise CommandError(
                    f"{pushed.revision.name} was kept, but no alias was moved to it: on {certify_for} its "
                    f"{certificate.breach}; train it on the quantized base, or try a scheme of more bits"
                )
            if alias != "-":
                client.set_alias(pushed.adapter.name, alias or "live", pushed.revision.digest)
            pushed = replace(pushed, revision=client.get(f"{pushed.adapter.name}@{pushed.revision.digest}")[1])
    if as_json:
        print_json({**_revision_json(pushed.revision), "created": pushed.created})
        return
    state = "pushed" if pushed.created else "unchanged, the store already has the same bytes:"
    out().print(f"{state} {pushed.revision.name}", markup=False, soft_wrap=True)
    print_certificates([pushed.revision])


@contextmanager
def _named_by_flags() -> Iterator[None]:
    """Name the flags instead of the fields of an upload's header that they fill."""
    from loraplex_client import InvalidRequestError

    try:
        yield
    except InvalidRequestError as error:
        flag = _HEADER_FLAGS.get(error.field)
        if flag is None:
            raise
        raise CommandError(error.message.replace(error.field, flag, 1)) from error


@app.command("list")
def list_(tenant: TenantOption = TENANT, store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """List the adapters that the tenant may use: its own and the shared ones."""
    with store_client(store, tenant) as client:
        adapters = client.list()
    if as_json:
        print_json([_adapter_json(adapter) for adapter in adapters])
        return
    print_rows(
        ("adapter", "base model", "live", "updated"),
        (
            (adapter.name, adapter.base_model, _short(adapter.aliases.get("live", "-")), _local(adapter.update_time))
            for adapter in adapters
        ),
    )


@app.command()
def show(
    name: NameArgument, tenant: TenantOption = TENANT, store: StoreOption = STORE, as_json: JsonOption = False
) -> None:
    """Show an adapter, its aliases and its revisions, newest first."""
    with store_client(store, tenant) as client:
        if "@" in name:
            adapter, revision = client.get(name)
            digest, revisions = revision.digest, client.revisions(adapter.name)
        else:
            adapter, revisions = look_up(client, name)
            digest = adapter.aliases.get("live", "")
    if as_json:
        listed = [_revision_json(revision) for revision in revisions]
        print_json({**_adapter_json(adapter), "revision": digest, "revisions": listed})
        return
    aliases = sorted(adapter.aliases.items())
    print_fields(
        (
            ("adapter", adapter.name),
            ("base model", adapter.base_model),
            *((f"alias {alias}", digest) for alias, digest in aliases),
            ("created", _local(adapter.create_time)),
            ("updated", _local(adapter.update_time)),
        )
    )
    print_rows(
        ("revision", "rank", "MiB", "created"),
        (
            (revision.digest, revision.rank, f"{revision.weight_bytes / 2**20:.1f}", _local(revision.create_time))
            for revision in revisions
        ),
    )
    print_certificates(revisions)


@app.command()
def delete(
    name: NameArgument,
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove the files at once, though answers may still run on them.")
    ] = False,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Remove an adapter with all its revisions. Their files stay for a while, for answers that run on them."""
    with store_client(store, tenant) as client:
        client.delete(name, purge=purge)
    out().print(f"{'purged' if purge else 'deleted'} {name}", markup=False)


app.command("top")(adapters_top)
app.command("push-all")(push_all)
for command in (alias, rollback, download, certify, warm, pin, unpin, grant, ungrant, grants):
    app.command()(command)


@contextmanager
def _progress_bar(what: str) -> Iterator[Progress | None]:
    """Provide the callback that draws the bytes sent, or None outside a terminal."""
    if not err().is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=err(), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda sent, total: bar.update(task, completed=sent, total=total)


def _adapter_json(adapter: Adapter) -> dict[str, Any]:
    return {
        "name": adapter.name,
        "base_model": adapter.base_model,
        "aliases": dict(adapter.aliases),
        "create_time": adapter.create_time.isoformat(),
        "update_time": adapter.update_time.isoformat(),
    }


def _revision_json(revision: Revision) -> dict[str, Any]:
    return {
        "name": revision.name,
        "digest": revision.digest,
        "base_model": revision.base_model,
        "base_digest": revision.base_digest,
        "rank": revision.rank,
        "weight_bytes": revision.weight_bytes,
        "create_time": revision.create_time.isoformat(),
        "certificates": [certificate_json(certificate) for certificate in revision.certificates],
    }


def _short(digest: str) -> str:
    return digest[:19]


def _local(time: datetime) -> str:
    return f"{time.astimezone():%Y-%m-%d %H:%M}"
