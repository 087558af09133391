"""`loraplex plans`: the quotas of tenants and API keys, at the store's operators' port."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from artifacts.plans import FIELDS, REAL_FIELDS, PlansError, PlansFile
from clients.cli.options import STORE, JsonOption, StoreOption
from clients.cli.service import Service
from clients.cli.terminal import CommandError, out, print_json, print_rows

if TYPE_CHECKING:
    from loraplex.admin.v1 import plans_pb2
    from loraplex_client.calls import Script

app = typer.Typer(no_args_is_help=True, help="Read and change what tenants and API keys may use. For operators.")

NameArgument = Annotated[str, typer.Argument(metavar="PLAN", help="default, tenants/TENANT or keys/KEYID.")]


def check_plans(path: Path | None) -> None:
    """Raise CommandError where a plans file has a fault."""
    try:
        if path is not None:
            PlansFile(path)
    except PlansError as error:
        raise CommandError(str(error)) from error


@app.command("list")
def list_(store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """List the plans."""
    from loraplex.admin.v1 import plans_pb2

    plans = _service(store).list("ListPlans", plans_pb2.ListPlansRequest(page_size=1000), lambda page: page.plans)
    if as_json:
        print_json([_plan_json(plan) for plan in plans])
    else:
        print_rows(("plan", "limits"), ((plan.name, _limits(plan)) for plan in plans))


@app.command()
def show(name: NameArgument, store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """Show a plan."""
    from loraplex.admin.v1 import plans_pb2

    plan = _service(store).ask("GetPlan", plans_pb2.GetPlanRequest(name=name)).plan
    if as_json:
        print_json(_plan_json(plan))
    else:
        print_rows(("limit", "value"), ((field, _text(value)) for field, value in _set_limits(plan).items()))


@app.command("set")
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
    plan = _service(store).run(_set(name, dict(map(_read_limit, limits)))).plan
    if as_json:
        print_json(_plan_json(plan))
    else:
        out().print(f"{plan.name}: {_limits(plan) or 'no limits'}", markup=False, soft_wrap=True)


@app.command()
def delete(name: NameArgument, store: StoreOption = STORE) -> None:
    """Delete a plan: a tenant then has the default plan, an API key no limits of its own."""
    from loraplex.admin.v1 import plans_pb2

    _service(store).ask("DeletePlan", plans_pb2.DeletePlanRequest(name=name))
    out().print(f"deleted {name}", markup=False)


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
    from loraplex.admin.v1 import plans_pb2_grpc

    return Service("store", store, plans_pb2_grpc.PlanServiceStub)


def _set(name: str, limits: dict[str, float | None]) -> Script[plans_pb2.SetPlanResponse]:
    """Change a plan as it was read; the store refuses that if it has changed meanwhile."""
    from loraplex.admin.v1 import plans_pb2
    from loraplex_client import NotFoundError
    from loraplex_client.calls import Call

    try:
        plan = (yield Call("GetPlan", plans_pb2.GetPlanRequest(name=name))).plan
    except NotFoundError:
        plan = plans_pb2.Plan(name=name)
    for field, value in limits.items():
        if value is None:
            plan.ClearField(field)
        else:
            setattr(plan, field, value)
    answer: plans_pb2.SetPlanResponse = yield Call("SetPlan", plans_pb2.SetPlanRequest(plan=plan))
    return answer
