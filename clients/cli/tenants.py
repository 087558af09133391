"""`loraplex tenants`: remove everything of a tenant."""

from __future__ import annotations

from typing import Annotated

import typer

from clients.cli.options import STORE, JsonOption, StoreOption
from clients.cli.service import Service
from clients.cli.terminal import CommandError, out, print_json

app = typer.Typer(no_args_is_help=True, help="Remove tenants. For operators.")


@app.callback()
def tenants() -> None:
    """Keep `purge` a command of its own."""


@app.command()
def purge(
    name: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Remove all adapters, grants, API keys and the plan of a tenant from the store, at once and for good.

    Prints what was removed, and looks whether something is left; exits with 1 if so.

    [bold]loraplex tenants purge acme --yes[/]
    """
    from loraplex.admin.v1 import tenants_pb2, tenants_pb2_grpc

    if not yes:
        typer.confirm(f"Remove everything of {name}, without a way back?", abort=True)
    service = Service("store", store, tenants_pb2_grpc.TenantServiceStub)
    purged = service.ask("PurgeTenant", tenants_pb2.PurgeTenantRequest(tenant=name))
    if as_json:
        names = ("removed", "removed_count", "left", "kept_for_others")
        values = {field: getattr(purged, field) for field in names}
        print_json({field: value if isinstance(value, int) else list(value) for field, value in values.items()})
    else:
        for line in purged.removed:
            out().print(f"removed {line}", markup=False, soft_wrap=True)
        for line in purged.kept_for_others:
            out().print(f"kept for others {line}", markup=False, soft_wrap=True)
        out().print(f"{purged.removed_count} removed, {len(purged.left)} left", markup=False)
    if purged.left:
        raise CommandError(f"{purged.left[0]} is left", exit_code=1)
