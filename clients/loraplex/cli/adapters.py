"""`loraplex adapters`: a tenant's adapters in the adapter store, and on the workers' devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli.adapters_top import adapters_top
from loraplex.cli.calibration import calibrate, print_calibrations
from loraplex.cli.computations import ModelDirOption, certify, certify_revision, print_certificates
from loraplex.cli.gguf_models import adapter_name, peft_directory
from loraplex.cli.options import (
    ROUTER,
    STORE,
    TENANT,
    JsonOption,
    NameArgument,
    RouterOption,
    StoreOption,
    TenantOption,
    read_duration,
    read_seconds,
    worker_ids,
)
from loraplex.cli.service import Service, cluster_service, store_client
from loraplex.cli.terminal import (
    Columns,
    CommandError,
    err,
    format_timestamp,
    message_values,
    print_fields,
    print_json,
    print_table,
    say,
)
from loraplex.cli.upload_tree import push_all

if TYPE_CHECKING:
    from loraplex_client import Adapter, Revision, StoreClient
    from loraplex_client.adapters import Progress

# Flags that fill the fields of an upload's header.
_HEADER_FLAGS = {"header.adapter": "--name", "header.alias": "--alias", "header.base_model": "--model"}
_HEADER_FLAGS |= {field.removeprefix("header."): flag for field, flag in _HEADER_FLAGS.items()}

# Timeout in seconds of asking a router what its workers take: an upload needs none.
_ASK_S = 1.0

app = typer.Typer(
    no_args_is_help=True,
    help="Push, list, show and delete a tenant's adapters; show and control where workers keep them.",
)
AliasArgument = Annotated[str, typer.Argument(metavar="ALIAS", help="live, or a name such as canary.")]
WorkerOption = Annotated[
    str,
    typer.Option(
        "--worker",
        metavar="WORKER",
        help="Only this worker. Without it: every worker of the adapter's base model.",
        autocompletion=worker_ids,
    ),
]
ToOption = Annotated[str, typer.Option("--to", metavar="TENANT", help="The other tenant.")]


@app.command()
def push(  # noqa: PLR0913, PLR0917  # one parameter a flag
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A peft adapter: its configuration and safetensors; or one in GGUF."),
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name that requests use; default: the directory's.")] = "",
    tenant: TenantOption = TENANT,
    model: Annotated[str, typer.Option(metavar="NAME", help="Base model, needed if the store has several.")] = "",
    alias: Annotated[
        str, typer.Option(metavar="ALIAS", help="Alias to move to this revision: `live` by default, `-` for none.")
    ] = "",
    certify_for: Annotated[
        str,
        typer.Option(
            "--certify",
            metavar="SCHEME|DIR",
            help="Certify it on a quantized base, such as int8, before the alias moves; needs --model-dir.",
        ),
    ] = "",
    model_dir: ModelDirOption = None,
    ttl: Annotated[
        str,
        typer.Option(metavar="TIME", help="Delete the revision after this time, such as 12h, unless an alias has it."),
    ] = "",
    store: StoreOption = STORE,
    router: RouterOption = ROUTER,
    as_json: JsonOption = False,
) -> None:
    """Upload an adapter as a new revision and make it live.

    [bold]loraplex adapters push ./support-lora --name support --tenant acme[/]
    """
    if certify_for and model_dir is None:
        raise CommandError("--certify: give the directory of the base model with --model-dir")
    name, ttl_s = name or adapter_name(directory), read_seconds("--ttl", ttl) if ttl else None
    with peft_directory(directory, model_dir) as files, store_client(store, tenant) as client:
        with _progress_bar(f"{directory}") as progress:
            first = "-" if certify_for else alias
            former = _digest_of(client, name, alias or "live")
            with _named_by_flags():
                pushed = client.push(files, name, base_model=model, alias=first, ttl_s=ttl_s, progress=progress)
        if certify_for and model_dir is not None:
            certificate = certify_revision(client, pushed.revision, certify_for, model_dir)
            if certificate.verdict == "refused":
                raise CommandError(
                    f"{pushed.revision.name} was kept, but no alias was moved to it: unfit for {certify_for}: "
                    f"{certificate.breach}; train it on the quantized base, or try a scheme of more bits"
                )
            if alias != "-":
                client.set_alias(pushed.adapter.name, alias or "live", pushed.revision.digest)
            pushed = replace(pushed, revision=client.get(f"{pushed.adapter.name}@{pushed.revision.digest}")[1])
    if warning := _rank_warning(pushed.revision, router, tenant):
        pushed = replace(pushed, warnings=(*pushed.warnings, warning))
    if as_json:
        print_json({**vars(pushed.revision), "created": pushed.created, "warnings": pushed.warnings})
        return
    state = "pushed" if pushed.created else "unchanged, the store already has the same bytes:"
    say(f"{state} {pushed.revision.name}")
    digest = pushed.revision.digest
    if alias != "-" and former != digest:
        moved = f"moved from {former[:19]} to" if former else "is"
        say(f"{alias or 'live'} {moved} {digest[:19]}")
    for note in (*_notes(directory), *pushed.warnings):
        say(note)
    print_certificates([pushed.revision])


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="URI",
            help="hf://ORG/REPO\\[@REVISION], s3://BUCKET/FOLDER, gs://, az://, oci://REGISTRY/REPO:TAG, or "
            "file:///FOLDER of the store's machine.",
        ),
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name that requests use.")],
    tenant: TenantOption = TENANT,
    model: Annotated[str, typer.Option(metavar="NAME", help="Base model, needed if the store has several.")] = "",
    alias: Annotated[
        str, typer.Option(metavar="ALIAS", help="Alias to move to this revision: `live` by default, `-` for none.")
    ] = "",
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Import an adapter from an allowed source and make it live.

    [bold]loraplex adapters import hf://acme/support-lora --name support --tenant acme[/]
    """
    with store_client(store, tenant) as client, _progress_bar(source) as progress, _named_by_flags():
        imported = client.import_revision(source, name, base_model=model, alias=alias, progress=progress)
    revision = imported.revision
    if as_json:
        fields = {**vars(revision), "provenance": revision.provenance and asdict(revision.provenance)}
        print_json({**fields, "created": imported.created, "warnings": imported.warnings})
        return
    say(f"{'imported' if imported.created else 'unchanged, the store already has the same bytes:'} {revision.name}")
    if revision.provenance is not None:
        say(f"from {revision.provenance.pin}")
    for warning in imported.warnings:
        say(warning)


@app.command("export")
def export(
    name: NameArgument,
    destination: Annotated[str, typer.Argument(metavar="URI", help="oci://REGISTRY/REPO:TAG")],
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Export an adapter to a registry, as a model artifact that `adapters import` reads.

    [bold]loraplex adapters export support oci://registry.example.com/acme/support:v1 --tenant acme[/]
    """
    with store_client(store, tenant) as client, _progress_bar(destination) as progress:
        exported = client.export_revision(name, destination, progress=progress)
    say(f"{exported.pin}: {exported.revision.name}")


def _digest_of(client: StoreClient, name: str, alias: str) -> str:
    """Return the digest that an alias of an adapter names; empty where there is none."""
    from loraplex_client import LoraplexError

    if alias == "-":
        return ""
    try:
        return client.get(f"{name}@{alias}")[1].digest
    except LoraplexError:  # the upload says what is wrong, if more is than that it is new
        return ""


def _notes(directory: Path) -> Iterator[str]:
    """Yield what an upload took from a directory beside the weights."""
    from loraplex_client.adapter_directory import template_file

    if name := template_file(directory):
        yield f"{name} was taken: chats with the adapter use its template"


def _rank_warning(revision: Revision, router: str, tenant: str) -> str:
    """Return that the workers do not take a revision's rank; empty where they do, or no router answers."""
    from loraplex_client import Client, LoraplexError

    with suppress(LoraplexError), Client(router, tenant, timeout_s=_ASK_S) as client:
        named = (model for model in client.models() if model.name == revision.base_model)
        return next((model.rank_warning(revision.rank) for model in named), "")
    return ""


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
    columns: Columns = {
        "adapter": "name",
        "base model": "base_model",
        "live": lambda adapter: adapter["aliases"].get("live", "-")[:19],
        "updated": lambda adapter: _local(adapter["update_time"]),
    }
    print_table(map(_adapter_json, adapters), columns, as_json=as_json)


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
        print_json({**_adapter_json(adapter), "revision": digest, "revisions": revisions})
        return
    aliases = [(f"alias {alias}", digest) for alias, digest in sorted(adapter.aliases.items())]
    times = [("created", _local(adapter.create_time)), ("updated", _local(adapter.update_time))]
    print_fields([("adapter", adapter.name), ("base model", adapter.base_model), *aliases, *times])
    columns: Columns = {
        "revision": "digest",
        "rank": "rank",
        "MiB": lambda revision: f"{revision.weight_bytes / 2**20:.1f}",
        "created": lambda revision: _local(revision.create_time),
    }
    print_table(revisions, columns)
    print_certificates(revisions)
    print_calibrations((revision, revision.calibrations) for revision in revisions)


@app.command()
def delete(
    name: NameArgument,
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove the files at once, even while answers use them.")
    ] = False,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Delete an adapter with all its revisions. Running answers keep the files for a while."""
    with store_client(store, tenant) as client:
        client.delete(name, purge=purge)
    say(f"{'purged' if purge else 'deleted'} {name}")


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
    return {name: value for name, value in vars(adapter).items() if name != "etag"}


def _local(time: datetime) -> str:
    return f"{time.astimezone():%Y-%m-%d %H:%M}"


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
    """Move an alias of an adapter to a revision, or remove it. Running requests keep theirs.

    [bold]loraplex adapters alias support live canary --tenant acme[/]
    """
    if remove == bool(revision):
        raise CommandError("give a REVISION, or --remove")
    with store_client(store, tenant) as client:
        adapter, revisions = look_up(client, name)
        digest = "" if remove else adapter.aliases.get(revision) or _whole(name, revisions, revision)
        client.set_alias(adapter.name, alias, digest)
    say(f"{adapter.name}: {alias} {f'is {digest}' if digest else 'is removed'}")


def rollback(name: NameArgument, tenant: TenantOption = TENANT, store: StoreOption = STORE) -> None:
    """Move `live` to the revision uploaded before the current one."""
    with store_client(store, tenant) as client:
        adapter, revisions = look_up(client, name)
        live = adapter.aliases.get("live")
        if live is None:
            raise CommandError(f"{adapter.name} has no alias live")
        digests = [revision.digest for revision in revisions]
        older = digests[digests.index(live) + 1 :]
        if not older:
            raise CommandError(f"{adapter.name}: nothing to roll back to: live is the first revision")
        client.set_alias(adapter.name, "live", older[0])
    say(f"{adapter.name}: live moved from {live[:19]} to {older[0]}")


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
    say(f"{directory}: {revision.name}")


def look_up(client: StoreClient, name: str) -> tuple[Adapter, tuple[Revision, ...]]:
    """Return an adapter, which may lack the alias live, and its revisions, newest first."""
    revisions = client.revisions(name)
    adapter, _ = client.get(f"{name}@{revisions[0].digest}")
    return adapter, revisions


def _whole(name: str, revisions: Sequence[Revision], text: str) -> str:
    """Return the only digest of an adapter that begins with `text`. Raises CommandError."""
    matches = [one.digest for one in revisions if one.digest.startswith((text, f"sha256:{text}"))]
    if len(matches) != 1:
        raise CommandError(f"{name} has {'several revisions' if matches else 'no alias or revision'} {text!r}")
    return matches[0]


def warm(
    name: NameArgument, worker: WorkerOption = "", router: RouterOption = ROUTER, tenant: TenantOption = TENANT
) -> None:
    """Load an adapter on the workers' devices before its first request. It may be evicted."""
    cluster_service(router, tenant).ask("WarmAdapter", adapter=name, worker_id=worker)
    typer.echo(f"{name} is loading on {worker or 'every worker'}")


def pin(
    name: NameArgument, worker: WorkerOption = "", router: RouterOption = ROUTER, tenant: TenantOption = TENANT
) -> None:
    """Keep an adapter's current revision on the workers' devices; without --worker also on workers that start later."""
    cluster_service(router, tenant).ask("PinAdapter", adapter=name, worker_id=worker)
    typer.echo(f"{name} is pinned on {worker or 'every worker'}; `loraplex adapters top` counts pinned adapters")


def unpin(
    name: NameArgument, worker: WorkerOption = "", router: RouterOption = ROUTER, tenant: TenantOption = TENANT
) -> None:
    """Let the workers evict an adapter again."""
    cluster_service(router, tenant).ask("UnpinAdapter", adapter=name, worker_id=worker)
    typer.echo(f"{name} is no longer pinned on {worker or 'every worker'}")


def grant(
    name: NameArgument,
    to: ToOption,
    ttl: Annotated[str, typer.Option(metavar="TIME", help="Duration, such as 30d; default: until ungrant.")] = "",
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Let another tenant use an adapter, by its full name: tenants/TENANT/adapters/NAME."""
    duration = read_duration("--ttl", ttl) if ttl else None
    created = _service(store, tenant).ask("CreateGrant", adapter=name, tenant=to, ttl=duration).grant
    say(f"{to} may use {created.adapter}{f' for {ttl}' if ttl else ''}")


def ungrant(name: NameArgument, to: ToOption, tenant: TenantOption = TENANT, store: StoreOption = STORE) -> None:
    """End a grant. New requests are refused within a second; running ones go on."""
    _service(store, tenant).ask("DeleteGrant", adapter=name, tenant=to)
    say(f"{to} may no longer use {name}")


def grants(
    name: NameArgument, tenant: TenantOption = TENANT, store: StoreOption = STORE, as_json: JsonOption = False
) -> None:
    """List the other tenants that may use an adapter."""
    granted = _service(store, tenant).list("ListGrants", "grants", adapter=name)
    columns: Columns = {
        "tenant": "tenant",
        "since": lambda one: format_timestamp(one.create_time),
        "until": lambda one: format_timestamp(one.expire_time),
    }
    print_table(granted, columns, as_json=as_json, values=lambda one: {"expire_time": None, **message_values(one)})


def _service(store: str, tenant: str) -> Service:
    return Service("store", store, "admin.v1.grants", tenant)


app.command("top")(adapters_top)
app.command("push-all")(push_all)
for command in (alias, rollback, download, certify, calibrate, warm, pin, unpin, grant, ungrant, grants):
    app.command()(command)
