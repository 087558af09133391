"""The week of an operator: sets up tenants, changes plans, keys and certificates, drains, backs up and restores."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

from loraplex_client import Client, ResourceExhaustedError, Tls, UnauthenticatedError
from tests.weeks.conftest import Person, Workplace, until

TEAMS = """
tenants:
  initech:
    plan: {tokens_per_day: 9000, weight: 2}
    keys: {ci: {scopes: [generate], ttl: 90d}, admin: {role: tenant-admin}}
    adapters: {polite: ./polite}
"""
ASK = 'loraplex generate "Hello" --adapter polite --max-tokens 4'


def set_up(workplace: Workplace) -> tuple[Person, Person]:
    """Set up initech as its file says; return the operator, and initech's program."""
    operator = workplace.operator
    polite = operator.directory / "polite"
    polite.mkdir(exist_ok=True)
    (polite / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}')
    (polite / "adapter_model.safetensors").write_bytes(b"polite")
    (operator.directory / "initech.yaml").write_text(TEAMS)
    operator.run("loraplex tenants apply -f initech.yaml --keys-dir ./keys")
    program = workplace.person("initech", operator.directory / "keys" / "initech-ci.key")
    until(lambda: program.tries(ASK), "routers know the key")
    return operator, program


def test_tenants_come_from_a_file_and_usage_is_seen(workplace: Workplace) -> None:
    operator, _ = set_up(workplace)
    assert "1 tenants: no changes" in operator.run("loraplex tenants apply -f initech.yaml --keys-dir ./keys")
    listed = {one["tenant"]: one for one in operator.json("loraplex tenants list")}
    assert (listed["initech"]["keys"], listed["initech"]["adapters"]) == (2, 1)

    def used() -> bool:
        (found,) = [one for one in operator.json("loraplex usage") if one["tenant"] == "initech" and not one["key"]]
        return 0 < int(found["counts"]["tokens_per_day"]["used"]) < 9000

    until(used, "the store knows what was used")
    operator.run("loraplex plans set tenants/initech tokens_per_day=9500 concurrent_streams=5")
    assert {"tokens_per_day": 9500, "concurrent_streams": 5}.items() <= _plan(operator).items()
    operator.run("loraplex plans set tenants/initech tokens_per_day=9000 concurrent_streams=")
    assert "concurrent_streams" not in _plan(operator)


def _plan(operator: Person) -> dict[str, object]:
    plan: dict[str, object] = operator.json("loraplex plans show tenants/initech")
    return plan


def test_keys_and_certificates_are_rotated_and_calls_are_answered(workplace: Workplace) -> None:
    operator, program = set_up(workplace)
    (key,) = [one for one in operator.json("loraplex keys list --tenant initech") if one["label"] == "ci"]
    operator.run(f"loraplex keys rotate {key['key_id']} --grace 1h --out keys/ci-2.key")
    second = workplace.person("initech", operator.directory / "keys" / "ci-2.key")
    until(lambda: second.tries(ASK), "routers know the second secret")
    program.run(ASK)
    (rotated,) = [one for one in operator.json("loraplex keys list --tenant initech") if one["label"] == "ci"]
    assert rotated["former_expire_time"], "the first secret ends after the grace"

    secured = workplace.secured
    before = (secured / "router.pem").read_bytes()
    operator.run(f"loraplex certs renew {secured} --ca")  # no certificate outlives its authority
    assert "renewed" in operator.run(f"loraplex certs renew {secured} --within 365")
    assert (secured / "router.pem").read_bytes() != before
    until(lambda: second.tries(ASK), "the parts have read the new authority")
    for step in ("added a key", "encrypts"):  # the third is due 15 minutes later
        assert step in operator.run(f"loraplex certs rotate-job-key {secured / 'job.key'}")
        until(lambda: second.tries(ASK), "routers and workers have read the job keys")


def test_a_worker_is_drained(workplace: Workplace) -> None:
    operator, program = set_up(workplace)
    first, _ = operator.json("loraplex workers")
    operator.run(f"loraplex drain {first['worker_id']}")
    until(lambda: len(operator.json("loraplex workers")) == 1, "the worker is gone")
    program.run(ASK)


PRICED = """
prices:
  currency: EUR
  models: {tiny: {input: 1000, cached: 500, output: 2000}}
tenants:
  hooli:
    plan: {budget_per_month: 0.05, budget_warning: 0.02}
    keys: {app: {}, admin: {role: tenant-admin}}
"""


def test_a_budget_warns_then_refuses_and_the_month_is_exported(workplace: Workplace) -> None:
    operator = workplace.operator
    (operator.directory / "hooli.yaml").write_text(PRICED.replace("currency: EUR", ""))
    operator.refused("loraplex tenants apply -f hooli.yaml --keys-dir ./keys", "currency")
    (operator.directory / "hooli.yaml").write_text(PRICED)
    operator.run("loraplex tenants apply -f hooli.yaml --keys-dir ./keys")
    key = operator.directory / "keys" / "hooli-app.key"
    admin = workplace.person("hooli", key.with_name("hooli-admin.key"))
    with Client(workplace.router, api_key=key.read_text().strip(), tls=Tls(workplace.secured / "ca.pem")) as client:
        until(lambda: _is_known(client), "routers know the key")
        left = _until_refused(client)
    assert {warned for _, warned in left} == {False, True}
    for remaining, warned in left:
        assert warned == (remaining < 0.0301), left
    month = f"{datetime.now(UTC):%Y-%m}"

    def spent() -> Decimal:
        (own,) = [one for one in admin.json("loraplex usage") if not one["key"]]
        return Decimal(str(own["counts"]["budget_per_month"]["used"]))

    until(lambda: spent() == Decimal("0.048"), "the store knows what was spent")
    files = workplace.directory / "usage.jsonl"
    until(lambda: files.exists() and files.read_text().count('"cost":"0.003') == 16, "the events are on the disk")
    rows = list(csv.DictReader(io.StringIO(operator.run(f"loraplex usage report --month {month} {files}"))))
    (row,) = [row for row in rows if row["tenant"] == "hooli" and row["currency"] == "EUR"]
    events = [one["data"] for one in map(json.loads, files.read_text().splitlines()) if "cost" in one["data"]]
    for column in ("input_tokens", "cached_tokens", "output_tokens"):
        assert int(row[column]) == sum(event[column] for event in events)
    assert Decimal(row["cost"]) == sum(Decimal(event["cost"]) for event in events) == spent()
    assert row["month"] == month


def _until_refused(client: Client) -> list[tuple[float, bool]]:
    """Ask until the budget is spent; return what was left of it at each call, and whether that was a warning.

    Calls before the prices are known cost nothing, each of the others 0.003 EUR.
    """
    left: list[tuple[float, bool]] = []
    while True:
        try:
            told = client.generate("p", max_tokens=1).rate_limits
        except ResourceExhaustedError as error:
            if "budget_per_month" not in str(error):
                raise
            return left
        left.append((told["budget"].remaining if "budget" in told else 0.05, "budget-warning" in told))


def _is_known(client: Client) -> bool:
    try:
        client.models()
    except UnauthenticatedError:
        return False
    return True


@contextmanager
def restored_store(data: Path, removals: Path) -> Iterator[Person]:
    """Run a store on a copy, as `loraplex store --data DATA --removals REMOVALS`; yields somebody who looks at it."""
    command = [sys.executable, "-m", "loraplex", "store", "--data", str(data), "--removals", str(removals)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([*command, "--port", "0"], **pipes) as store:  # type: ignore[call-overload]
        try:
            address = store.stdout.readline().split()[1].removeprefix("store=")
            yield Person(data, {"LORAPLEX_STORE_ADDRESS": address})
        finally:
            store.terminate()


def test_a_backup_is_restored_without_what_was_taken_away_since(workplace: Workplace) -> None:
    operator, _ = set_up(workplace)
    operator.run("loraplex tenants create umbrella")
    operator.run("loraplex keys create --tenant initech --label lost --out keys/lost.key")
    kept = workplace.secured / "data" / "store"
    operator.run(f"loraplex backup --from {kept} --to backups/monday")
    lost = (operator.directory / "keys" / "lost.key").read_text().split("_")[1]
    operator.run(f"loraplex keys revoke {lost}")
    assert "store" in operator.run("loraplex tenants purge umbrella --yes")
    until(lambda: len(list((kept / "removals").glob("*-*"))) >= 2, "the store has noted both")
    operator.run("loraplex backup --from backups/monday --to restored")
    with restored_store(operator.directory / "restored", kept / "removals") as reader:
        (key,) = [one for one in reader.json("loraplex keys list") if one["key_id"] == lost]
        assert key["revoke_time"]
        tenants = {one["tenant"] for one in reader.json("loraplex tenants list")}
        assert "initech" in tenants
        assert "umbrella" not in tenants
        assert "polite" in reader.run("loraplex adapters list --tenant initech")
