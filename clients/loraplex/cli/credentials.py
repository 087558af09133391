"""`loraplex keys`, `certs` and `redis`: API keys, certificates for development and the users of Redis."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli.options import STORE, JsonOption, StoreOption, read_duration
from loraplex.cli.service import Service
from loraplex.cli.terminal import (
    Columns,
    CommandError,
    format_timestamp,
    message_values,
    print_json,
    print_table,
    say,
)

if TYPE_CHECKING:
    from loraplex.admin.v1 import keys_pb2
    from loraplex.cli.development_ca import DevelopmentCa
    from loraplex.contracts.broker.acl import Passwords

keys = typer.Typer(no_args_is_help=True, help="Create, list, rotate and revoke API keys.")

IdArgument = Annotated[str, typer.Argument(metavar="KEYID", help="The part of the key after `lpx_`.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="New file for the key, which only its owner may read.")
]
certs = typer.Typer(no_args_is_help=True, help="Create and renew certificates for development.")
HostOption = Annotated[
    list[str] | None,
    typer.Option("--host", metavar="HOST", help="A further name or address of the servers. Repeatable."),
]
DaysOption = Annotated[int, typer.Option("--days", metavar="N", min=1, max=3650, help="Validity of the certificates.")]
# Parts of a cluster that listen, and names and addresses that they have on their own machine.
SERVING_PARTS = ("store", "router", "worker", "gateway")
OWN_HOSTS = ("localhost", "127.0.0.1", "::1")
# Begins the comment of a file of job keys that names the key which encrypts no more.
_RETIRED = "# retired: "
CERTIFICATE_KINDS = (*SERVING_PARTS, "valkey", "batches", "operator", "auditor", "tenant", "tenant-admin")

redis = typer.Typer(no_args_is_help=True, help="Create the users of Redis: router, worker, operator.")


@keys.command()
def create(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Tenant of the key, if not yours or an operator's.")] = "",
    role: Annotated[
        str, typer.Option(metavar="ROLE", help="tenant-user, tenant-admin, trainer, operator or auditor.")
    ] = "tenant-user",
    scope: Annotated[
        list[str] | None, typer.Option(metavar="SCOPE", help="Restrict it to this scope. Repeatable.")
    ] = None,
    label: Annotated[str, typer.Option(metavar="TEXT", help="A label, such as its place of use.")] = "",
    ttl: Annotated[str, typer.Option(metavar="TIME", help="Validity, such as 90d or 12h.")] = "",
    file: OutOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Create a key and print it once: the store keeps only its hash.

    [bold]loraplex keys create --tenant acme --label ci --ttl 90d --out acme.key[/]
    """
    duration = read_duration("--ttl", ttl) if ttl else None
    check_new(file)
    text, key = make_key(store, tenant=tenant, role=role, scopes=scope or (), label=label, ttl=duration)
    _give(text, key, file, as_json)


@keys.command("list")
def list_(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Only keys of this tenant.")] = "",
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """List the keys, without their secrets."""
    columns: Columns = {
        "key": "key_id",
        "tenant": lambda key: key.tenant or "-",
        "role": "role",
        "scopes": lambda key: " ".join(key.scopes) or "all",
        "label": "label",
        "made": lambda key: format_timestamp(key.create_time),
        "expires": lambda key: format_timestamp(key.expire_time),
        "last used": lambda key: format_timestamp(key.last_use_time),
        "revoked": lambda key: format_timestamp(key.revoke_time),
    }
    listed = _service(store).list("ListKeys", "keys", tenant=tenant)
    print_table(listed, columns, as_json=as_json, values=message_values)


@keys.command()
def revoke(key_id: IdArgument, store: StoreOption = STORE) -> None:
    """Revoke a key. Routers and stores refuse it within a second."""
    _service(store).ask("RevokeKey", key_id=key_id)
    say(f"revoked {key_id}")


@keys.command()
def rotate(
    key_id: IdArgument,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="Time that the current secret stays valid, such as 1h; 0s: none.")
    ] = "1d",
    file: OutOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Give a key a new secret and print it; the current one stays valid for a while."""
    duration = read_duration("--grace", grace)
    check_new(file)
    text, key = _draw(store, "RotateKey", key_id=key_id, grace=duration)
    _give(text, key, file, as_json)


@keys.command()
def bootstrap(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file, for the store's --bootstrap-key.")],
) -> None:
    """Create the first operator's key. Start the store with `--bootstrap-key FILE`."""
    say(f"wrote key {make_first_key(file)} to {file}")


def make_first_key(file: Path) -> str:
    """Write a first operator's key to a new file; return its id. Raises CommandError."""
    from loraplex.runtime.tenancy.api_keys import new_api_key

    check_new(file)
    key_id, text, _ = new_api_key()
    write_key(file, text)
    return key_id


def make_key(store: str, **fields: Any) -> tuple[str, keys_pb2.Key]:
    """Make a key with these fields of CreateKeyRequest; return it and what the store has of it. Raises CommandError."""
    return _draw(store, "CreateKey", request_id=str(uuid.uuid4()), **fields)


def _draw(store: str, method: str, **fields: Any) -> tuple[str, keys_pb2.Key]:
    """Draw a secret and give it to a key: the call can then be repeated if its answer is lost."""
    from loraplex.runtime.tenancy.api_keys import PREFIX, hash_of

    secret = secrets.token_urlsafe(32)
    answer = _service(store).ask(method, secret_sha256=hash_of(secret), **fields)
    # A store before 0.2.0 draws the secret itself.
    return answer.api_key or f"{PREFIX}{answer.key.key_id}_{secret}", answer.key


def check_new(file: Path | None) -> None:
    """Raise CommandError where a file for a key exists already."""
    if file is not None and file.exists():
        raise CommandError(f"{file} exists already; name another file")


def write_key(file: Path, text: str) -> None:
    """Write a key to a new file that only its owner may read."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(text + "\n")


def _give(text: str, key: keys_pb2.Key, file: Path | None, as_json: bool) -> None:
    if file is not None:
        write_key(file, text)
    if as_json:
        print_json({**message_values(key), **({} if file is not None else {"api_key": text})})
    elif file is not None:
        say(f"wrote key {key.key_id} to {file}")
    else:
        say(text)


def _service(store: str) -> Service:
    return Service("store", store, "admin.v1.keys")


@certs.command()
def dev(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the files, made if missing.")],
    host: HostOption = None,
    tenant: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Also make a certificate of this tenant. Repeatable.")
    ] = None,
    days: DaysOption = 365,
) -> None:
    """Make an authority, certificates of the parts, of a runner of batches and of an operator, and a job key.

    Files are NAME.pem and NAME-key.pem; ca.pem is the authority. Anybody with ca-key.pem can make certificates of
    everybody: for a real cluster use your own authority, with the same URIs as names.

    [bold]loraplex certs dev ./certs --tenant acme[/]
    """
    if (directory / "ca.pem").exists():
        raise CommandError(f"{directory / 'ca.pem'} exists already; name another directory")
    make_credentials(directory, host or (), tenant or (), timedelta(days=days))
    say(f"wrote ca.pem, job.key, and certificates with their keys, into {directory}")


def make_credentials(
    directory: Path, hosts: Sequence[str] = (), tenants: Sequence[str] = (), life: timedelta = timedelta(days=365)
) -> None:
    """Make an authority, the parts' certificates, an operator's and those of tenants, and a job key.

    Raises CommandError.
    """
    from loraplex.cli.development_ca import DevelopmentCa, write_private
    from loraplex.contracts.broker.job_keys import new_job_key

    for name in tenants:
        _check_subject("tenant", name, "--tenant")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    ca = DevelopmentCa(life)
    hosts = [*OWN_HOSTS, *hosts]
    for part in SERVING_PARTS:
        ca.write(directory, part, ca.issue(f"loraplex://{part}/{part}", hosts, life))
    for name in ("operator", "batches"):
        ca.write(directory, name, ca.issue(f"loraplex://{name}/{name}", life=life))
    write_private(directory / "job.key", new_job_key().encode())
    for name in tenants:
        ca.write(directory, f"tenant-{name}", ca.issue(f"loraplex://tenant-admin/{name}", life=life))
    ca.write_ca(directory)  # the last file: a directory with it is whole


@certs.command()
def issue(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of `certs dev`.")],
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"{', '.join(CERTIFICATE_KINDS)}.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the tenant, router or person.")],
    host: HostOption = None,
    days: DaysOption = 365,
) -> None:
    """Make another certificate, as KIND-NAME.pem and KIND-NAME-key.pem. Parts serve localhost and each --host.

    For Valkey's TLS: `certs issue DIR valkey valkey-1 --host redis.internal`.

    [bold]loraplex certs issue ./certs router router-2 --host router-2.internal[/]
    """
    if kind not in CERTIFICATE_KINDS:
        raise CommandError(f"KIND: {kind} is not one of {', '.join(CERTIFICATE_KINDS)}")
    _check_subject(kind, name, "NAME")
    if host and kind not in {*SERVING_PARTS, "valkey"}:
        raise CommandError(f"--host: a certificate of kind {kind} is not for servers; leave it out")
    ca, file = _authority(directory), f"{kind}-{name}"
    if (directory / f"{file}.pem").exists():
        raise CommandError(f"{directory / file}.pem exists already; `loraplex certs renew` makes it anew")
    hosts = [*OWN_HOSTS, *(host or ())] if kind in {*SERVING_PARTS, "valkey"} else []
    try:
        ca.write(directory, file, ca.issue(f"loraplex://{kind}/{name}", hosts, timedelta(days=days)))
    except ValueError as error:
        raise CommandError(f"{directory}: {error}") from error
    say(f"wrote {file}.pem and {file}-key.pem into {directory}")


@certs.command()
def renew(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of `certs dev`.")],
    within: Annotated[int, typer.Option(metavar="N", min=0, help="Renew those that end within so many days.")] = 30,
    authority: Annotated[
        bool, typer.Option("--ca", help="Make another authority, which signs from then on; ca.pem has both.")
    ] = False,
    days: DaysOption = 365,
    as_json: JsonOption = False,
) -> None:
    """Renew certificates that end soon, with new keys under the same names, and list all.

    Running processes take the new files within seconds. No certificate outlives its authority: renew that first.

    [bold]loraplex certs renew ./certs --within 30[/]
    """
    ca = _authority(directory)
    if authority:
        ca.successor(timedelta(days=days)).write_ca(directory)
        say(f"copy ca.pem of {directory} to all processes and clients, then run `loraplex certs renew --within {days}`")
        return
    try:
        ends = ca.ends(directory)
        until = min(datetime.now(UTC) + timedelta(days=within), ca.life_end - timedelta(seconds=1))
        soon = [name for name, end in ends.items() if end <= until and name != "ca"]
        ends |= {name: ca.renew(directory, name, timedelta(days=days)) for name in soon}
    except (OSError, ValueError) as error:
        raise CommandError(f"{directory}: {error}") from error
    columns: Columns = {
        "certificate": "name",
        "ends": lambda row: f"{row['end']:%Y-%m-%d %H:%M}",
        "now": lambda row: "renewed" if row["renewed"] else "-",
    }
    rows = [{"name": name, "end": end, "renewed": name in soon} for name, end in ends.items()]
    print_table(rows, columns, as_json=as_json)


@certs.command(name="rotate-job-key")
def rotate_job_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of job keys, of routers and workers.")],
) -> None:
    """Take the next step to another job key: add it, let it encrypt, remove the former one.

    After each step copy FILE to all routers and workers, which read it again; then run the command again.

    [bold]loraplex certs rotate-job-key ./certs/job.key[/]
    """
    from loraplex.cli.development_ca import write_private
    from loraplex.contracts.broker.job_keys import JobKeys, new_job_key

    try:
        ids = list(JobKeys(file).content)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    lines = [f"{line.strip()}\n" for line in file.read_text().splitlines()]
    keys = [line for line in lines if line.strip() and not line.startswith("#")]
    if f"{_RETIRED}{ids[-1]}\n" in lines:
        write_private(file, "".join(keys[:-1]).encode())
        say(f"removed key {ids[-1]}; copy {file} to all routers and workers")
    elif len(ids) == 1:
        write_private(file, "".join([*keys, new_job_key()]).encode())
        say(f"added a key that decrypts alone; copy {file} to all routers and workers, then run this again")
    else:
        write_private(file, "".join([keys[-1], *keys[:-1], f"{_RETIRED}{ids[-2]}\n"]).encode())
        say(f"key {ids[-1]} encrypts; copy {file} to all routers and workers, and run this again in 15 minutes")


def _authority(directory: Path) -> DevelopmentCa:
    from loraplex.cli.development_ca import DevelopmentCa

    try:
        return DevelopmentCa.read(directory)
    except (OSError, ValueError) as error:
        raise CommandError(f"{directory}: no authority of `loraplex certs dev`: {error}") from error


def _check_subject(kind: str, name: str, flag: str) -> None:
    """Check the name in a certificate. Raises CommandError."""
    from loraplex.runtime.tenancy.certificates import RESERVED_TENANTS
    from loraplex.runtime.tenancy.guard import is_tenant

    if kind.startswith("tenant"):
        if not is_tenant(name) or name in RESERVED_TENANTS:
            raise CommandError(f"{flag} {name}: not a tenant's name")
    elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,50}", name):
        raise CommandError(f"{flag} {name}: at most 51 letters, digits, '.', '_' and '-'")


@redis.callback()
def _redis_group() -> None:
    """Keep `acl` a command of its own."""


@redis.command()
def acl(  # one parameter a flag
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of the password files; missing ones are made.")
    ],
    model: Annotated[list[str], typer.Option(metavar="NAME", help="Base model whose queue workers use. Repeatable.")],
    cell: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Cell on this server; default: main. Repeatable.")
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Set the users on the server, and load the functions of this version.")
    ] = False,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Make new passwords; the current ones stay valid until the next rotation.")
    ] = False,
    url: Annotated[
        str,
        typer.Option(
            "--redis-url",
            envvar="LORAPLEX_REDIS_URL",
            metavar="URL",
            help="The server, with a user that may set users.",
        ),
    ] = "",
) -> None:
    """Print an ACL file for the server (valkey-server --aclfile FILE), or set its users with --apply.

    The default user is turned off. Processes read their passwords from DIR/USER/password.

    [bold]loraplex redis acl ./redis-users --model Qwen2-0.5B > users.acl[/]
    """
    from loraplex.contracts.artifacts import ArtifactError
    from loraplex.contracts.artifacts.names import check_base_name
    from loraplex.contracts.broker.acl import DEFAULT_USER, ROLES, acl_file, read_passwords, rotated, write_passwords
    from loraplex.contracts.broker.cells import is_cell_name

    try:
        models = [check_base_name(name) for name in model]
    except ArtifactError as error:
        raise CommandError(str(error)) from error
    cells = cell or ["main"]
    for name in cells:
        if not is_cell_name(name):
            raise CommandError(f"--cell {name}: letters, digits, '-', '_' and '.'")
    if rotate and not apply:
        raise CommandError("--rotate: needs --apply, because the server must know a password before processes use it")
    if apply and not url:
        raise CommandError("--apply: name the server with --redis-url, or LORAPLEX_REDIS_URL")
    passwords = read_passwords(directory, list(ROLES))
    if rotate:
        passwords = rotated(passwords)
    if apply:
        saved = asyncio.run(_apply(url, models, cells, passwords))
    write_passwords(directory, passwords)
    if not apply:
        print("\n".join([*acl_file(models, cells, passwords), " ".join(["user", *DEFAULT_USER])]))
        return
    say(f"set the users {', '.join(ROLES)} and turned the default user off")
    if not saved:
        say("the server has no ACL file: it forgets them when it restarts")


async def _apply(url: str, models: list[str], cells: list[str], passwords: Passwords) -> bool:
    """Set the users on all nodes; return whether the server keeps them over a restart. Raises CommandError."""
    from loraplex.contracts.broker.acl import set_users
    from loraplex.contracts.broker.connection import REDIS_DOWN, RedisUnreachableError, connect

    try:
        async with await connect(url) as client:
            return await set_users(client, models, cells, passwords)
    except (RedisUnreachableError, *REDIS_DOWN) as error:
        raise CommandError(str(error)) from error
