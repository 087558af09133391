"""`loraplex tenants`: remove everything of a tenant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from clients.cli.options import ROUTER, STORE, JsonOption, StoreOption
from clients.cli.service import Service, cluster_service
from clients.cli.terminal import CommandError, out, print_json, print_rows

app = typer.Typer(no_args_is_help=True, help="Remove tenants. For operators.")


@app.callback()
def tenants() -> None:
    """Keep `purge` a command of its own."""


@app.command()
def purge(
    name: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    store: StoreOption = STORE,
    routers: Annotated[
        str,
        typer.Option(
            "--router",
            metavar="HOST:PORT[,...]",
            envvar="LORAPLEX_ADDRESS",
            help="Operators' address of one router of each cell; empty: only the store.",
        ),
    ] = ROUTER,
    as_json: JsonOption = False,
) -> None:
    """Remove everything of a tenant from the store and from the cells, at once and for good.

    In the store: adapters, grants, API keys and plans. In a cell: calls, waiting jobs, what Redis keeps by the name,
    caches of the routers, adapters and prefixes at the workers. Prints what was removed, and what another look still
    found; exits with 1 if anything was, or if a part of a cell did not answer.

    [bold]loraplex tenants purge acme --yes[/]
    """
    if not yes:
        typer.confirm(f"Remove everything of {name}, without a way back?", abort=True)
    purged = _purge_store(store, name)  # first: so nothing new comes, and workers learn what is gone
    places = [place for router in filter(None, routers.split(",")) for place in _purge_cell(router.strip(), name)]
    if as_json:
        print_json({**purged, "places": places})
    else:
        _print(purged, places)
    _check(purged["left"], places)


def _print(purged: dict[str, Any], places: Sequence[dict[str, Any]]) -> None:
    for line in purged["removed"]:
        out().print(f"removed {line}", markup=False, soft_wrap=True)
    for line in purged["kept_for_others"]:
        out().print(f"kept for others {line}", markup=False, soft_wrap=True)
    rows = [("store", "", purged["removed_count"], len(purged["left"]), "")]
    rows += [(place["part"], place["place"], place["removed"], place["left"], _note(place)) for place in places]
    print_rows(("part", "place", "removed", "left", "note"), rows)


def _note(place: dict[str, Any]) -> str:
    if place["kept"]:
        return f"{place['kept']} stay for their time"
    return place["error"] or ("emptied for all tenants" if place["of_all_tenants"] else "")


def _check(left: Sequence[str], places: Sequence[dict[str, Any]]) -> None:
    """Raise CommandError where something is left, or where that is not known."""
    if left:
        raise CommandError(f"{left[0]} is left", exit_code=1)
    for place in places:
        if place["error"]:
            raise CommandError(f"{place['part']}: {place['error']}; purge the tenant again", exit_code=1)
        if place["left"]:
            what = f"{place['part']}: {place['left']} {place['place']} are left"
            raise CommandError(f"{what}, in use; purge the tenant again", exit_code=1)


def _purge_store(store: str, name: str) -> dict[str, Any]:
    from loraplex.admin.v1 import tenants_pb2, tenants_pb2_grpc

    service = Service("store", store, tenants_pb2_grpc.TenantServiceStub)
    purged = service.ask("PurgeTenant", tenants_pb2.PurgeTenantRequest(tenant=name))
    return {
        "removed": list(purged.removed),
        "removed_count": purged.removed_count,
        "left": list(purged.left),
        "kept_for_others": list(purged.kept_for_others),
    }


def _purge_cell(router: str, name: str) -> list[dict[str, Any]]:
    from loraplex.cluster.v1 import cluster_pb2

    answer = cluster_service(router, "").ask("PurgeTenant", cluster_pb2.PurgeTenantRequest(tenant=name))
    return [{field.name: getattr(place, field.name) for field in place.DESCRIPTOR.fields} for place in answer.places]
