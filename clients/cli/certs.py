"""`loraplex certs`: a certificate authority and certificates for development."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from clients.cli.terminal import CommandError, out

app = typer.Typer(no_args_is_help=True, help="Make certificates for development.")


@app.callback()
def certs() -> None:
    """Keep `dev` a command of its own."""


@app.command()
def dev(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files go; made if it is missing.")],
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="A name or address of the servers, beside localhost; may be repeated."),
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Also make a certificate of this tenant; may be repeated.")
    ] = None,
    days: Annotated[int, typer.Option(metavar="N", min=1, max=3650, help="How long the certificates live.")] = 365,
) -> None:
    """Make an authority, certificates of a store, a router, a worker and an operator, and a job key.

    Files are NAME.pem and NAME-key.pem; ca.pem is the authority. Anybody with ca-key.pem can make certificates of
    everybody: for a real cluster use your own authority, with the same URIs as names.

    [bold]loraplex certs dev ./certs --tenant acme[/]
    """
    from broker.job_keys import new_job_key
    from rpc.identity.development_ca import DevelopmentCa, write_private
    from rpc.identity.tenant_header import is_tenant

    if (directory / "ca.pem").exists():
        raise CommandError(f"{directory / 'ca.pem'} exists already; name another directory")
    for name in tenant or ():
        if not is_tenant(name) or name == "shared":
            raise CommandError(f"--tenant {name}: not a tenant's name")
    directory.mkdir(parents=True, exist_ok=True)
    ca, life = DevelopmentCa(timedelta(days=days)), timedelta(days=days)
    ca.write_ca(directory)
    hosts = ["localhost", "127.0.0.1", "::1", *(host or ())]
    for part in ("store", "router", "worker"):
        ca.write(directory, part, ca.issue(f"loraplex://{part}/{part}", hosts, life))
    ca.write(directory, "operator", ca.issue("loraplex://operator/operator", life=life))
    write_private(directory / "job.key", new_job_key().encode())
    for name in tenant or ():
        ca.write(directory, f"tenant-{name}", ca.issue(f"loraplex://tenant-admin/{name}", life=life))
    wrote = f"wrote ca.pem, job.key, and certificates with their keys, into {directory}"
    out().print(wrote, markup=False, soft_wrap=True)
