"""`loraplex keys`: the API keys of tenants and operators, at the store's operators' port."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.options import STORE, JsonOption, StoreOption, read_duration
from clients.cli.service import Service
from clients.cli.terminal import CommandError, format_timestamp, out, print_json, print_rows

if TYPE_CHECKING:
    from loraplex.admin.v1 import keys_pb2

app = typer.Typer(no_args_is_help=True, help="Make, list, rotate and revoke API keys. For operators.")

IdArgument = Annotated[str, typer.Argument(metavar="KEYID", help="The part of the key after `lpx_`.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="New file for the key, which only its owner may read.")
]


@app.command()
def create(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whose key it is; none for an operator's.")] = "",
    role: Annotated[
        str, typer.Option(metavar="ROLE", help="tenant-user, tenant-admin, operator or auditor.")
    ] = "tenant-user",
    scope: Annotated[
        list[str] | None, typer.Option(metavar="SCOPE", help="Restrict it to this scope; may be repeated.")
    ] = None,
    label: Annotated[str, typer.Option(metavar="TEXT", help="Where it is used.")] = "",
    ttl: Annotated[str, typer.Option(metavar="TIME", help="How long it lives, such as 90d or 12h.")] = "",
    file: OutOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it. Nobody can show it again: the store keeps its hash.

    [bold]loraplex keys create --tenant acme --label ci --ttl 90d --out acme.key[/]
    """
    from loraplex.admin.v1 import keys_pb2

    request = keys_pb2.CreateKeyRequest(tenant=tenant, role=role, scopes=scope or (), label=label)
    if ttl:
        request.ttl.CopyFrom(read_duration("--ttl", ttl))
    _check_new(file)
    answer = _service(store).ask("CreateKey", request)
    _give(answer.api_key, answer.key, file, as_json)


@app.command("list")
def list_(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Only this tenant's.")] = "",
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """List the keys, without their secrets."""
    from loraplex.admin.v1 import keys_pb2

    request = keys_pb2.ListKeysRequest(tenant=tenant, page_size=1000)
    keys = _service(store).list("ListKeys", request, lambda page: page.keys)
    if as_json:
        print_json([_key_json(key) for key in keys])
        return
    print_rows(
        ("key", "tenant", "role", "scopes", "label", "made", "expires", "revoked"),
        (
            (
                key.key_id,
                key.tenant or "-",
                key.role,
                " ".join(key.scopes) or "all",
                key.label,
                format_timestamp(key.create_time),
                format_timestamp(key.expire_time),
                format_timestamp(key.revoke_time),
            )
            for key in keys
        ),
    )


@app.command()
def revoke(key_id: IdArgument, store: StoreOption = STORE) -> None:
    """End a key for good. Routers and stores refuse it within a second."""
    from loraplex.admin.v1 import keys_pb2

    _service(store).ask("RevokeKey", keys_pb2.RevokeKeyRequest(key_id=key_id))
    out().print(f"revoked {key_id}", markup=False)


@app.command()
def rotate(
    key_id: IdArgument,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="How long the present secret stays valid, such as 1h; 0s ends it now.")
    ] = "1d",
    file: OutOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Make another secret of a key and print the key; the present one stays valid for a while."""
    from loraplex.admin.v1 import keys_pb2

    request = keys_pb2.RotateKeyRequest(key_id=key_id, grace=read_duration("--grace", grace))
    _check_new(file)
    answer = _service(store).ask("RotateKey", request)
    _give(answer.api_key, answer.key, file, as_json)


@app.command()
def bootstrap(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file, for the store's --bootstrap-key.")],
) -> None:
    """Make the first operator's key, for a store that has none. Start the store with `--bootstrap-key FILE`."""
    from rpc.identity.api_keys import new_api_key

    _check_new(file)
    key_id, text, _ = new_api_key()
    _write(file, text)
    out().print(f"wrote key {key_id} to {file}", markup=False)


def _check_new(file: Path | None) -> None:
    if file is not None and file.exists():
        raise CommandError(f"{file} exists already; name another file")


def _write(file: Path, text: str) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(text + "\n")


def _give(text: str, key: keys_pb2.Key, file: Path | None, as_json: bool) -> None:
    if file is not None:
        _write(file, text)
    if as_json:
        print_json({**_key_json(key), **({} if file is not None else {"api_key": text})})
    elif file is not None:
        out().print(f"wrote key {key.key_id} to {file}", markup=False)
    else:
        out().print(text, markup=False, soft_wrap=True)


def _key_json(key: keys_pb2.Key) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(key, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _service(store: str) -> Service:
    from loraplex.admin.v1 import keys_pb2_grpc

    return Service("store", store, keys_pb2_grpc.KeyServiceStub)
