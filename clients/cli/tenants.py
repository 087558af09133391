"""`loraplex plans` and `loraplex tenants`: tenants' quotas, and the removal of all that is theirs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.options import ROUTER, STORE, JsonOption, StoreOption
from clients.cli.service import Service, cluster_service
from clients.cli.terminal import CommandError, message_values, print_json, print_rows, say
from tenancy.plans import FIELDS, REAL_FIELDS, PlansError, PlansFile

if TYPE_CHECKING:
    from loraplex.admin.v1 import plans_pb2

plans = typer.Typer(no_args_is_help=True, help="Read and change what tenants and API keys may use. For operators.")

NameArgument = Annotated[str, typer.Argument(metavar="PLAN", help="default, tenants/TENANT or keys/KEYID.")]
tenants = typer.Typer(no_args_is_help=True, help="Remove tenants. For operators.")


def check_plans(path: Path | None) -> None:
    """Raise CommandError where a plans file has a fault."""
    try:
        if path is not None:
            PlansFile(path)
    except PlansError as error:
        raise CommandError(str(error)) from error


@plans.command("list")
def list_(store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """List the plans."""
    listed = _service(store).list("ListPlans", "plans")
    if as_json:
        print_json([_plan_json(plan) for plan in listed])
    else:
        print_rows(("plan", "limits"), ((plan.name, _limits(plan)) for plan in listed))


@plans.command()
def show(name: NameArgument, store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """Show a plan."""
    plan = _service(store).ask("GetPlan", name=name).plan
    if as_json:
        print_json(_plan_json(plan))
    else:
        print_rows(("limit", "value"), ((field, _text(value)) for field, value in _set_limits(plan).items()))


@plans.command("set")
def set_(
    name: NameArgument,
    limits: Annotated[
        list[str],
        typer.Argument(
            metavar="LIMIT=VALUE...",
            help=f"Limits to set, of {', '.join(FIELDS)}; LIMIT= without a value removes one.",
        ),
    ],
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Set limits of a plan, and make the plan if there is none; its other limits stay. Holds within a second.

    [bold]loraplex plans set tenants/acme tokens_per_day=2000000 concurrent_streams=50[/]

    [bold]loraplex plans set keys/0123456789abcdef weight=3 queue_share=0.25 adapters=10[/]
    """
    plan = _set(_service(store), name, dict(map(_read_limit, limits)))
    if as_json:
        print_json(_plan_json(plan))
    else:
        say(f"{plan.name}: {_limits(plan) or 'no limits'}")


@plans.command()
def delete(name: NameArgument, store: StoreOption = STORE) -> None:
    """Delete a plan: a tenant then has the default plan, an API key no limits of its own."""
    _service(store).ask("DeletePlan", name=name)
    say(f"deleted {name}")


def _read_limit(text: str) -> tuple[str, float | None]:
    """Read LIMIT=VALUE; None: the limit is removed."""
    field, equals, value = text.partition("=")
    if field not in FIELDS or not equals:
        raise CommandError(f"{text}: write LIMIT=VALUE, LIMIT one of {', '.join(FIELDS)}")
    if not value:
        return field, None
    try:
        number = float(value) if field in REAL_FIELDS else int(value)
    except ValueError:
        raise CommandError(f"{text}: {value!r} is not a number") from None
    if not abs(number) < 1 << 63:
        raise CommandError(f"{text}: {value!r} is too large")
    return field, number


def _set_limits(plan: plans_pb2.Plan) -> dict[str, float]:
    return {field.name: value for field, value in plan.ListFields() if field.name in FIELDS}


def _text(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _limits(plan: plans_pb2.Plan) -> str:
    return " ".join(f"{field}={_text(value)}" for field, value in _set_limits(plan).items())


def _plan_json(plan: plans_pb2.Plan) -> dict[str, Any]:
    return {"name": plan.name, "etag": plan.etag, **_set_limits(plan)}


def _service(store: str) -> Service:
    return Service("store", store, "admin.v1.plans")


def _set(service: Service, name: str, limits: dict[str, float | None]) -> plans_pb2.Plan:
    """Change a plan as it was read, and return it; the store refuses that if it has changed meanwhile."""
    from loraplex.admin.v1 import plans_pb2
    from loraplex_client import NotFoundError

    try:
        plan: Any = service.ask("GetPlan", name=name).plan
    except CommandError as error:
        if not isinstance(error.__cause__, NotFoundError):
            raise
        plan = plans_pb2.Plan(name=name)
    for field, value in limits.items():
        if value is None:
            plan.ClearField(field)
        else:
            setattr(plan, field, value)
    answer: plans_pb2.Plan = service.ask("SetPlan", plan=plan).plan
    return answer


@tenants.callback()
def _tenants_group() -> None:
    """Keep `purge` a command of its own."""


@tenants.command()
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
        try:
            agreed = typer.confirm(f"Remove everything of {name}, without a way back?")
        except typer.Abort as error:  # stdin has ended
            raise CommandError("nobody answered whether to remove the tenant; --yes removes it unasked") from error
        if not agreed:
            return
    # The store first: so nothing new comes, and workers learn what is gone.
    purged = message_values(Service("store", store, "admin.v1.tenants").ask("PurgeTenant", tenant=name))
    cells = [cluster_service(router.strip(), "") for router in filter(None, routers.split(","))]
    places = [message_values(place) for cell in cells for place in cell.ask("PurgeTenant", tenant=name).places]
    if as_json:
        print_json({**purged, "places": places})
    else:
        _print(purged, places)
    _check(purged["left"], places)


def _print(purged: dict[str, Any], places: Sequence[dict[str, Any]]) -> None:
    for line in purged["removed"]:
        say(f"removed {line}")
    for line in purged["kept_for_others"]:
        say(f"kept for others {line}")
    rows = [("store", "", purged["removed_count"], len(purged["left"]), "")]
    rows += [(place["part"], place["place"], place["removed"], place["left"], _note(place)) for place in places]
    print_rows(("part", "place", "removed", "left", "note"), rows)


def _note(place: dict[str, Any]) -> str:
    if place["kept"]:
        return f"{place['kept']} stay for their time"
    return place["error"] or ("emptied for all tenants" if place["of_all_tenants"] else "")


def _check(remaining: Sequence[str], places: Sequence[dict[str, Any]]) -> None:
    """Raise CommandError where something is left, or where that is not known."""
    if remaining:
        raise CommandError(f"{remaining[0]} is left", exit_code=1)
    for place in places:
        if place["error"]:
            raise CommandError(f"{place['part']}: {place['error']}; purge the tenant again", exit_code=1)
        if place["left"]:
            what = f"{place['part']}: {place['left']} {place['place']} are left"
            raise CommandError(f"{what}, in use; purge the tenant again", exit_code=1)
