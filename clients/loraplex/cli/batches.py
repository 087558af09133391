"""`loraplex batches`: files of requests that are answered at the lowest priority, and files of their answers."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraplex.cli.options import STORE, TENANT, JsonOption, StoreOption, TenantOption, read_seconds
from loraplex.cli.service import explained
from loraplex.cli.terminal import CommandError, print_fields, print_json, print_table, say

if TYPE_CHECKING:
    from loraplex_client import Batch, BatchClient

app = typer.Typer(no_args_is_help=True, help="Answer files of requests when the cluster has time for them.")
BatchArgument = Annotated[str, typer.Argument(metavar="BATCH", help="Id of a batch.")]
# Interval in seconds between looks of `--wait`.
_LOOK_S = 0.5


@contextmanager
def _client(store: str, tenant: str) -> Iterator[BatchClient]:
    from loraplex_client import BatchClient

    with explained("store", store), BatchClient(store, tenant) as client:
        yield client


@app.command()
def create(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Requests, a line each, as OpenAI's batches have them.")],
    endpoint: Annotated[
        str, typer.Option(metavar="PATH", help="Path of the requests: /v1/chat/completions or /v1/completions.")
    ] = "/v1/chat/completions",
    window: Annotated[str, typer.Option(metavar="TIME", help="After this no further line begins: 1m to 24h.")] = "24h",
    wait: Annotated[bool, typer.Option("--wait", help="Return when the batch has ended.")] = False,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Upload a file of requests and begin a batch of its lines.

    [bold]loraplex batches create requests.jsonl --tenant acme --wait[/]
    """
    window_s = read_seconds("--window", window)
    with _client(store, tenant) as client:
        batch = client.create(client.upload_file(file).id, endpoint, window_s=window_s)
        if not as_json:
            say(batch.id)
        while wait and not batch.has_ended:
            time.sleep(_LOOK_S)
            batch = client.get(batch.id)
    if as_json:
        print_json(dataclasses.asdict(batch))
    elif wait:
        _show(batch)
    if wait and batch.state != "completed":
        raise CommandError(f"{batch.id} is {batch.state}", 1)


@app.command("list")
def list_batches(tenant: TenantOption = TENANT, store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """List the tenant's batches, newest first."""
    with _client(store, tenant) as client:
        batches = client.list()
    if as_json:
        print_json([dataclasses.asdict(batch) for batch in batches])
        return
    columns = {
        "BATCH": "id",
        "STATE": "state",
        "ANSWERS": "completed",
        "ERRORS": "failed",
        "LINES": "total",
        "ENDPOINT": "endpoint",
    }
    print_table(batches, columns)


@app.command()
def show(
    batch: BatchArgument, tenant: TenantOption = TENANT, store: StoreOption = STORE, as_json: JsonOption = False
) -> None:
    """Show a batch, and what is wrong with its lines."""
    with _client(store, tenant) as client:
        shown = client.get(batch)
    if as_json:
        print_json(dataclasses.asdict(shown))
    else:
        _show(shown)


@app.command()
def cancel(batch: BatchArgument, tenant: TenantOption = TENANT, store: StoreOption = STORE) -> None:
    """Begin no further lines of a batch; those that have begun end."""
    with _client(store, tenant) as client:
        say(f"{batch} is {client.cancel(batch).state}")


@app.command()
def download(
    batch: BatchArgument,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Where to write; default: the standard output.")
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="The lines without an answer.")] = False,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Write the answers of a batch that has ended, a line each."""
    with _client(store, tenant) as client:
        found = client.get(batch)
        if not found.has_ended:
            raise CommandError(f"{batch} is {found.state}: its files come at its end", 1)
        file, what = (found.error_file, "errors") if errors else (found.output_file, "answers")
        if not file:
            raise CommandError(f"{batch} is {found.state} and has no {what}", 1)
        if to is None:
            client.download_file(file, sys.stdout.buffer.write)
            return
        part = to.with_name(f"{to.name}.part")
        with part.open("wb") as written:
            client.download_file(file, written.write)
        part.replace(to)
        say(f"wrote {to}")


def _show(batch: Batch) -> None:
    fields: dict[str, object] = {
        "batch": batch.id,
        "state": batch.state,
        "lines": batch.total,
        "answers": batch.completed,
        "errors": batch.failed,
        "window ends": batch.expire_time.isoformat(timespec="seconds"),
        "file of answers": batch.output_file or "-",
        "file of errors": batch.error_file or "-",
    }
    print_fields(fields.items())
    for error in batch.errors:
        say(error.message)
