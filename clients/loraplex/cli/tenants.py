"""`loraplex plans` and `loraplex tenants`: tenants' quotas, all of them from one file, and their removal."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli.credentials import check_new, make_key, write_key
from loraplex.cli.options import ROUTER, STORE, JsonOption, StoreOption, read_duration
from loraplex.cli.prices import load_yaml, mapping, price_rows, prices_to_pb, read_prices
from loraplex.cli.service import Service, cluster_service, explain, store_client
from loraplex.cli.terminal import (
    Activity,
    CommandError,
    message_values,
    print_json,
    print_rows,
    print_table,
    read_text,
    say,
)
from loraplex.cli.upload_tree import AdapterDirectory, AdapterTree, checked_adapter, upload_tree
from loraplex.contracts.plans import FIELDS, LIST_FIELDS, NAME_FIELDS, PRICES, REAL_FIELDS, Prices, make_plan
from loraplex.runtime.rpc.errors import InvalidField

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from loraplex.admin.v1 import keys_pb2, plans_pb2

plans = typer.Typer(no_args_is_help=True, help="Read and change what tenants and API keys may use. For operators.")

# The value of a field of a plan.
LimitValue = float | str | list[str]

NameArgument = Annotated[str, typer.Argument(metavar="PLAN", help="default, tenants/TENANT, keys/KEYID or prices.")]
KeysDirOption = Annotated[
    Path, typer.Option("--keys-dir", metavar="DIR", help="Directory of new keys, TENANT-LABEL.key.")
]
tenants = typer.Typer(no_args_is_help=True, help="List, set up and remove tenants. For operators.")


@plans.command("list")
def list_(store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """List the plans."""
    listed = _service(store).list("ListPlans", "plans")
    print_table(listed, {"plan": "name", "limits": _limits}, as_json=as_json, values=_plan_json)


@plans.command()
def show(name: NameArgument, store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """Show a plan, or the prices of a million tokens."""
    plan = _service(store).ask("GetPlan", name=name).plan
    if as_json:
        print_json(_plan_json(plan))
    elif plan.HasField("prices"):
        rows = ((of, *one.values(), plan.prices.currency) for of, one in price_rows(plan.prices).items())
        print_rows(("of", "input", "cached", "output", "currency"), rows)
    else:
        print_rows(("limit", "value"), ((field, _text(value)) for field, value in _set_limits(plan).items()))


@plans.command("set")
def set_(
    name: NameArgument,
    limits: Annotated[
        list[str],
        typer.Argument(
            metavar="LIMIT=VALUE...",
            help=f"Limits to set, of {', '.join(FIELDS)}; the last are names, "
            "or lists of them with commas. LIMIT= without a value removes one.",
        ),
    ],
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Set limits of a plan, which is created if needed; other limits stay.

    [bold]loraplex plans set tenants/acme tokens_per_day=2000000 concurrent_streams=50[/]

    [bold]loraplex plans set keys/0123456789abcdef weight=3 allowed_models=qwen allowed_adapters=support,sales-*[/]
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


def _read_limit(text: str) -> tuple[str, LimitValue | None]:
    """Read LIMIT=VALUE; None: the limit is removed."""
    field, equals, value = text.partition("=")
    if field not in FIELDS or not equals:
        raise CommandError(f"{text}: write LIMIT=VALUE, LIMIT one of {', '.join(FIELDS)}")
    if not value:
        return field, None
    if field in LIST_FIELDS:
        return field, value.split(",")
    if field in NAME_FIELDS:  # the store says which names are allowed
        return field, value
    try:
        number = float(value) if field in REAL_FIELDS else int(value)
    except ValueError:
        raise CommandError(f"{text}: {value!r} is not a number") from None
    if not abs(number) < 1 << 63:
        raise CommandError(f"{text}: {value!r} is too large")
    return field, number


def _set_limits(plan: plans_pb2.Plan) -> dict[str, LimitValue]:
    values = {field.name: value for field, value in plan.ListFields() if field.name in FIELDS}
    return {name: list(value) if name in LIST_FIELDS else value for name, value in values.items()}


def _text(value: LimitValue) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _limits(plan: plans_pb2.Plan) -> str:
    if plan.HasField("prices"):
        return f"{len(plan.prices.of)} in {plan.prices.currency}"
    return " ".join(f"{field}={_text(value)}" for field, value in _set_limits(plan).items())


def _plan_json(plan: plans_pb2.Plan) -> dict[str, Any]:
    prices: dict[str, Any] = {}
    if plan.HasField("prices"):
        prices = {"currency": plan.prices.currency, "prices": price_rows(plan.prices)}
    return {"name": plan.name, "etag": plan.etag, **_set_limits(plan), **prices}


def _service(store: str) -> Service:
    return Service("store", store, "admin.v1.plans")


def _set(service: Service, name: str, limits: Mapping[str, LimitValue | None]) -> plans_pb2.Plan:
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
        plan.ClearField(field)
        if value is not None:
            fields: dict[str, Any] = {field: value}
            plan.MergeFrom(plans_pb2.Plan(**fields))
    answer: plans_pb2.Plan = service.ask("SetPlan", plan=plan).plan
    return answer


@dataclass(frozen=True)
class KeySpec:
    """An API key as a file of tenants names it."""

    label: str
    role: str = "tenant-user"
    scopes: tuple[str, ...] = ()
    ttl: Duration | None = None


@dataclass(frozen=True)
class TenantSpec:
    """A tenant as a file names it; `plan` None: the file says nothing of its plan."""

    name: str
    plan: Mapping[str, LimitValue] | None
    keys: tuple[KeySpec, ...]
    adapters: tuple[AdapterDirectory, ...]


@tenants.command("list")
def list_tenants(store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """List the tenants that have a plan or an API key, with their limits and numbers of valid keys and adapters."""
    limits = {name: _limits(plan) for plan in _service(store).list("ListPlans", "plans") if (name := _tenant_of(plan))}
    keys = Counter(key.tenant for key in _valid_keys(store) if key.tenant)
    rows = []
    for name in sorted({*limits, *keys}):
        with store_client(store, name) as client:
            owned = sum(adapter.name.startswith(f"tenants/{name}/") for adapter in client.list())
        rows.append({"tenant": name, "plan": limits.get(name) or "-", "keys": keys[name], "adapters": owned})
    print_table(rows, {name: name for name in ("tenant", "plan", "keys", "adapters")}, as_json=as_json)


@tenants.command()
def create(
    name: Annotated[str, typer.Argument(metavar="TENANT", help="Its name.")],
    limits: Annotated[
        list[str] | None,
        typer.Argument(metavar="[LIMIT=VALUE]...", help=f"Limits of its plan, of {', '.join(FIELDS)}."),
    ] = None,
    keys_dir: KeysDirOption = Path("keys"),
    store: StoreOption = STORE,
) -> None:
    """Set up one tenant: its plan, and a key of its administrator in KEYS-DIR/TENANT-admin.key.

    For many, and for adapters, write a file and `loraplex tenants apply` it.

    [bold]loraplex tenants create acme tokens_per_day=2000000 weight=2[/]
    """
    plan = {field: value for field, value in map(_read_limit, limits or []) if value is not None}
    spec = _tenant(name, {"plan": plan, "keys": {"admin": {"role": "tenant-admin"}}}, Path())
    listed = _service(store).list("ListPlans", "plans")
    if name in map(_tenant_of, listed) or any(key.tenant == name for key in _valid_keys(store)):
        raise CommandError(f"{name}: is there already; `loraplex plans set` and `loraplex keys create` change it")
    set_up(store, [spec], keys_dir)


@tenants.command()
def apply(
    file: Annotated[Path, typer.Option("-f", "--file", metavar="FILE", help="YAML file of tenants.")],
    keys_dir: KeysDirOption = Path("keys"),
    model: Annotated[
        str, typer.Option(metavar="NAME", help="The adapters' base model, if the store has several.")
    ] = "",
    store: StoreOption = STORE,
) -> None:
    """Set up tenants as a file says: plans, API keys, adapters, prices. Applied again, it changes nothing.

    A plan of the file replaces the tenant's, prices all prices; a key is known by its label; an adapter's `live` moves
    to the revision in its directory. Tenants, keys and adapters that the file does not name stay as they are.

    [bold]loraplex tenants apply -f teams.yaml --keys-dir ./keys[/]
    """
    specs, prices = read_tenants(file)
    changes = set_up(store, specs, keys_dir, prices)
    tree = AdapterTree(tuple(adapter for spec in specs for adapter in spec.adapters))
    if tree.adapters:
        changes += _upload(store, tree, model)
    say(f"{len(specs)} tenants: {changes or 'no'} change{'' if changes == 1 else 's'}")


def key_file(directory: Path, tenant: str, label: str) -> Path:
    """Return the file of a key that `set_up` makes."""
    return directory / f"{tenant}-{label}.key"


def set_up(store: str, specs: Sequence[TenantSpec], keys_dir: Path, prices: Prices | None = None) -> int:
    """Set the prices and plans, and make the keys, that differ or are missing; return the number of changes."""
    listed = {plan.name: plan for plan in _service(store).list("ListPlans", "plans")}
    plans_of = {_tenant_of(plan): plan for plan in listed.values()}
    valid = {(key.tenant, key.label): key for key in _valid_keys(store)}
    changes = 0 if prices is None else _set_prices(store, prices, listed.get(PRICES, _no_plan()))
    for spec in specs:
        if spec.plan is not None and spec.plan != _set_limits(plans_of.get(spec.name, _no_plan())):
            removed = dict.fromkeys(_set_limits(plans_of.get(spec.name, _no_plan())))
            plan = _set(_service(store), f"tenants/{spec.name}", {**removed, **spec.plan})
            say(f"{spec.name}: plan {_limits(plan) or 'without limits'}")
            changes += 1
        for key in spec.keys:
            changes += _apply_key(store, spec.name, key, valid.get((spec.name, key.label)), keys_dir)
    return changes


def _set_prices(store: str, prices: Prices, known: plans_pb2.Plan) -> int:
    """Set the prices unless the store has them; return the number of changes."""
    wanted = _no_plan()
    wanted.MergeFrom(known)
    wanted.name = PRICES
    wanted.prices.CopyFrom(prices_to_pb(prices))
    if known == wanted:
        return 0
    say(f"prices: {_limits(_service(store).ask('SetPlan', plan=wanted).plan)}")
    return 1


def _upload(store: str, tree: AdapterTree, model: str) -> int:
    """Upload the adapters that differ or are missing; return the number of changes."""
    from loraplex_client import LoraplexError

    with Activity() as activity:
        try:
            return asyncio.run(upload_tree(store, tree, model, update=True, step=activity.step))
        except LoraplexError as error:
            raise explain(error, "store", store) from error


def _apply_key(store: str, tenant: str, spec: KeySpec, stored: keys_pb2.Key | None, directory: Path) -> int:
    """Make a key that the store lacks; return the number of changes. Raises CommandError for one of another role."""
    if stored is not None:
        for field, value, wanted in (
            ("role", stored.role, spec.role),
            ("scopes", sorted(stored.scopes), sorted(spec.scopes)),
        ):
            if value != wanted:
                raise CommandError(
                    f"tenants.{tenant}.keys.{spec.label}.{field}: {wanted}, and key {stored.key_id} has {value}; a key "
                    f"does not change: `loraplex keys revoke {stored.key_id}`, and apply the file again"
                )
        return 0
    file = key_file(directory, tenant, spec.label)
    check_new(file)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    text, key = make_key(store, tenant=tenant, role=spec.role, scopes=spec.scopes, label=spec.label, ttl=spec.ttl)
    write_key(file, text)
    say(f"{tenant}: key {key.key_id} ({spec.label}), written to {file}")
    return 1


def _valid_keys(store: str) -> list[keys_pb2.Key]:
    listed = Service("store", store, "admin.v1.keys").list("ListKeys", "keys")
    now_s = time.time()
    return [
        key
        for key in listed
        if not key.HasField("revoke_time") and not (key.HasField("expire_time") and key.expire_time.seconds <= now_s)
    ]


def _tenant_of(plan: plans_pb2.Plan) -> str:
    """Return the tenant whose plan it is; empty for the default plan and a key's."""
    return plan.name.removeprefix("tenants/") if plan.name.startswith("tenants/") else ""


def _no_plan() -> plans_pb2.Plan:
    from loraplex.admin.v1 import plans_pb2

    return plans_pb2.Plan()


def read_tenants(file: Path) -> tuple[list[TenantSpec], Prices | None]:
    """Read a file of tenants, and the prices that it may have.

    Raises CommandError, naming the field at fault, before anything is changed.
    """
    import yaml

    try:
        text = read_text(file, "--file")
        values = mapping(load_yaml(text), "the file", {"tenants", "prices"})
    except yaml.YAMLError as error:
        raise CommandError(f"--file: {file}: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise CommandError(f"--file: {file}: lists within lists, too deep") from None
    listed = mapping(values.get("tenants"), "tenants")
    prices = read_prices(values["prices"]) if "prices" in values else None
    return [_tenant(name, value, file.parent) for name, value in listed.items()], prices


def _tenant(name: str, value: Any, directory: Path) -> TenantSpec:
    from loraplex.runtime.tenancy.certificates import RESERVED_TENANTS  # these import gRPC
    from loraplex.runtime.tenancy.guard import is_tenant

    at = f"tenants.{name}"
    if not is_tenant(name) or name in RESERVED_TENANTS:
        raise CommandError(f"{at}: not a tenant's name")
    fields = mapping(value, at, {"plan", "keys", "adapters"})
    plan = None
    if "plan" in fields:
        plan = mapping(fields["plan"], f"{at}.plan", FIELDS)
        try:
            make_plan(f"{at}.plan", plan)
        except InvalidField as error:
            raise CommandError(error.message) from error
    keys = tuple(
        _key(f"{at}.keys.{label}", label, of_key) for label, of_key in mapping(fields.get("keys"), f"{at}.keys").items()
    )
    adapters = tuple(
        _adapter(f"{at}.adapters.{adapter}", name, adapter, path, directory)
        for adapter, path in mapping(fields.get("adapters"), f"{at}.adapters").items()
    )
    return TenantSpec(name, plan, keys, adapters)


def _key(at: str, label: str, value: Any) -> KeySpec:
    from loraplex.runtime.rpc.principal import TENANT_ROLES  # these import gRPC
    from loraplex.runtime.tenancy.permissions import SCOPES

    if not re.fullmatch(r"[\w.-]{1,100}", label, re.ASCII):
        raise CommandError(f"{at}: a label has 1 to 100 letters, digits, '-', '_' and '.': it names the key's file")
    fields = mapping(value, at, {"role", "scopes", "ttl"})
    role, scopes, ttl = fields.get("role", "tenant-user"), fields.get("scopes", []), fields.get("ttl")
    if role not in TENANT_ROLES:
        raise CommandError(f"{at}.role: {role!r} is not one of {', '.join(TENANT_ROLES)}")
    if not isinstance(scopes, list) or not set(map(str, scopes)) <= SCOPES:
        raise CommandError(f"{at}.scopes: a list of {', '.join(sorted(SCOPES))}")
    return KeySpec(label, role, tuple(scopes), read_duration(f"{at}.ttl", str(ttl)) if ttl else None)


def _adapter(at: str, tenant: str, name: str, path: Any, directory: Path) -> AdapterDirectory:
    if not isinstance(path, str):
        raise CommandError(f"{at}: name the adapter's directory, beginning at the file's")
    return checked_adapter(tenant, name, directory / path, at)


@tenants.command()
def purge(
    name: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    store: StoreOption = STORE,
    routers: Annotated[
        str,
        typer.Option(
            "--router",
            metavar="HOST:PORT[,...]",
            envvar="LORAPLEX_ADDRESS",
            help="Operator ports of routers, one for each set of cells, separated by commas; empty: only the store.",
        ),
    ] = ROUTER,
    as_json: JsonOption = False,
) -> None:
    """Remove all of a tenant's data from the store and the cells, irrevocably.

    In the store: adapters, grants, API keys and plans. In a cell: calls, waiting jobs, keys of Redis, routers' caches,
    and adapters and cached prompts at workers. Prints what was removed and what is left; exits with 1 if anything is
    left, or a part of a cell does not answer. HTTP gateways keep answers of /v1/responses for --responses-kept-s.

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
