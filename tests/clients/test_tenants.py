"""`loraplex tenants purge` and `loraplex adapters delete --purge` against a real store."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loraplex.cli.__main__ import app
from loraplex.cli.models import registered
from loraplex.cli.terminal import CommandError
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex_client import AsyncStoreClient


async def loraplex(store: str, *arguments: str, typed: str = "") -> str:
    """Run a command at the store; return what it prints."""
    command = [*arguments, "--store", store]
    result = await asyncio.to_thread(CliRunner().invoke, app, command, input=typed, standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


async def test_a_purge_asks_and_prints_what_it_removed(store: str) -> None:
    key_id = (await loraplex(store, "keys", "create", "--tenant", "acme")).strip().split("_")[1]
    await loraplex(store, "plans", "set", "tenants/acme", "tokens_per_day=1")
    assert "removed" not in await loraplex(store, "tenants", "purge", "acme", typed="n\n")
    with pytest.raises(CommandError, match="--yes"):
        await loraplex(store, "tenants", "purge", "acme")
    said = await loraplex(store, "tenants", "purge", "acme", "--router", "", typed="y\n")
    assert f"removed keys/{key_id}\n" in said
    assert "removed plans/tenants/acme\n" in said
    assert said.splitlines()[-1].split() == ["store", "2", "0"]
    empty = json.loads(await loraplex(store, "tenants", "purge", "acme", "--yes", "--json", "--router", ""))
    assert empty == {"removed": [], "removed_count": 0, "left": [], "kept_for_others": [], "places": []}


TEAMS = """
tenants:
  acme:
    plan: {tokens_per_day: 2000000, weight: 2.5}
    keys:
      ci: {scopes: [generate], ttl: 90d}
      admin: {role: tenant-admin}
    adapters:
      Support-v1.2: support
  globex:
    plan: {}
"""


async def test_a_file_of_tenants_is_applied_once(store: str, tmp_path: Path, adapter_directory: Path) -> None:
    model = read_base_model("hash:?vocab=1024&seed=3")
    async with AsyncStoreClient(store) as client:
        await client.register_model(registered(model), model.files)
    file, keys = tmp_path / "teams.yaml", tmp_path / "keys"
    file.write_text(TEAMS)
    applied = ("tenants", "apply", "-f", str(file), "--keys-dir", str(keys))
    said = await loraplex(store, *applied)
    assert said.splitlines()[0] == "acme: plan tokens_per_day=2000000 weight=2.5"
    assert said.splitlines()[-1] == "2 tenants: 4 changes"
    assert (keys / "acme-ci.key").read_text().startswith("lpx_")
    assert stat.S_IMODE((keys / "acme-ci.key").stat().st_mode) == 0o600
    assert await loraplex(store, *applied) == "2 tenants: no changes\n"
    file.write_text(TEAMS.replace(", weight: 2.5", ""))
    assert (await loraplex(store, *applied)).splitlines() == [
        "acme: plan tokens_per_day=2000000",
        "2 tenants: 1 change",
    ]
    listed = json.loads(await loraplex(store, "tenants", "list", "--json"))
    assert listed == [{"tenant": "acme", "plan": "tokens_per_day=2000000", "keys": 2, "adapters": 1}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("tokens_per_day", "tokens"), "tenants.acme.plan.tokens: not known; known are"),
        (("tokens_per_day: 2000000", "default_model: [a]"), "tenants.acme.plan.default_model: .* is not allowed"),
        (("2000000", "many"), "tenants.acme.plan.tokens_per_day: 'many' is not a number"),
        (("[generate]", "[all]"), "tenants.acme.keys.ci.scopes: a list of"),
        (("tenant-admin", "operator"), "tenants.acme.keys.admin.role: 'operator' is not one of"),
        (("support\n", "nothing\n"), "tenants.acme.adapters.Support-v1.2: .*nothing does not exist"),
        (("globex", "shared"), "tenants.shared: not a tenant's name"),
        (("plan: {}", "- x"), "tenants.globex: write NAME: VALUE lines"),
        (("ci:", "a/b:"), "tenants.acme.keys.a/b: a label has"),
        (("{}", "{"), "--file: .*teams.yaml: while parsing"),
        (("weight: 2.5", "tokens_per_day: 3"), "--file: .*teams.yaml: .tokens_per_day. is written twice"),
    ],
)
async def test_a_mistake_in_a_file_of_tenants_changes_nothing(
    store: str, tmp_path: Path, adapter_directory: Path, change: tuple[str, str], message: str
) -> None:
    file = tmp_path / "teams.yaml"
    file.write_text(TEAMS.replace(*change))
    with pytest.raises(CommandError, match=message):
        await loraplex(store, "tenants", "apply", "-f", str(file))
    assert json.loads(await loraplex(store, "tenants", "list", "--json")) == []


PRICED = """
tenants: {acme: {plan: {budget_per_month: 100, budget_warning: 80.5}}}
prices:
  currency: EUR
  models:
    tiny: {input: 0.15, cached: 0.075, output: 0.6}
  adapters:
    tenants/acme/adapters/support: {input: 1, output: 2}
"""


async def test_a_file_of_tenants_has_the_prices_of_all(store: str, tmp_path: Path) -> None:
    (file := tmp_path / "teams.yaml").write_text(PRICED)
    applied = ("tenants", "apply", "-f", str(file))
    assert (await loraplex(store, *applied)).splitlines() == [
        "prices: 2 in EUR",
        "acme: plan budget_per_month=100 budget_warning=80.5",
        "1 tenants: 2 changes",
    ]
    assert await loraplex(store, *applied) == "1 tenants: no changes\n"
    assert (await loraplex(store, "plans", "show", "prices")).splitlines()[1:] == [
        "tenants/acme/adapters/support\t1.0\t1.0\t2.0\tEUR",
        "tiny\t0.15\t0.075\t0.6\tEUR",
    ]
    shown = json.loads(await loraplex(store, "plans", "show", "prices", "--json"))
    assert (shown["currency"], shown["prices"]["tiny"]) == ("EUR", {"input": 0.15, "cached": 0.075, "output": 0.6})
    await loraplex(store, "plans", "delete", "prices")
    assert (await loraplex(store, *applied)).splitlines()[-1] == "1 tenants: 1 change"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("  currency: EUR\n", ""), "prices.currency: name the unit of the prices, such as EUR"),
        (("EUR", "1"), "prices.currency: name the unit of the prices by letters"),
        (("80.5", "100"), "tenants.acme.plan.budget_warning: 100 is not below budget_per_month, 100"),
        (("0.075", "0.2"), "prices.tiny: cached tokens cost more than input"),
        (("0.15", "0.1505"), "prices.models.tiny.input: 0.1505 has more than 3 decimals"),
        (("0.15", "cheap"), "prices.models.tiny.input: 'cheap' is not a number"),
        (("0.15", "-1"), "prices.tiny: a price is from 0 to 1000000 for a million tokens"),
        ((", output: 0.6", ""), "prices.models.tiny.output: missing; give the price of a million tokens"),
        (("tenants/acme/adapters/support", "tenants/acme/support"), "'tenants/acme/support' is not a name like"),
    ],
)
async def test_a_mistake_in_prices_or_budgets_changes_nothing(
    store: str, tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    (file := tmp_path / "teams.yaml").write_text(PRICED.replace(*change))
    with pytest.raises(CommandError, match=message):
        await loraplex(store, "tenants", "apply", "-f", str(file))
    assert json.loads(await loraplex(store, "plans", "list", "--json")) == []


async def test_one_tenant_is_created(store: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    created = ("tenants", "create", "acme", "tokens_per_day=2000000", "default_model=tiny", "--keys-dir", str(keys))
    said = await loraplex(store, *created)
    assert said.splitlines()[0] == "acme: plan tokens_per_day=2000000 default_model=tiny"
    assert (keys / "acme-admin.key").read_text().startswith("lpx_")
    listed = json.loads(await loraplex(store, "keys", "list", "--json"))
    assert [(key["tenant"], key["role"], key["label"]) for key in listed] == [("acme", "tenant-admin", "admin")]
    with pytest.raises(CommandError, match="acme: is there already"):
        await loraplex(store, *created)
    for wrong, message in (("Acme!", "not a tenant's name"), ("globex", "write LIMIT=VALUE")):
        with pytest.raises(CommandError, match=message):
            await loraplex(store, "tenants", "create", wrong, "tokens=1" if wrong == "globex" else "weight=1")


async def test_forty_teams(store: str, tmp_path: Path) -> None:
    file = tmp_path / "teams.yaml"
    teams = {f"team-{number:02}": {"plan": {"weight": number}, "keys": {"ci": {}}} for number in range(1, 41)}
    file.write_text(json.dumps({"tenants": teams}))  # JSON is YAML
    applied = ("tenants", "apply", "-f", str(file), "--keys-dir", str(tmp_path / "keys"))
    assert (await loraplex(store, *applied)).splitlines()[-1] == "40 tenants: 80 changes"
    assert await loraplex(store, *applied) == "40 tenants: no changes\n"
