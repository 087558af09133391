"""`loraplex usage report`: a month's CSV is what accounts were charged and events say, to the token and nano-unit."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from random import Random

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from loraplex.cli.__main__ import app
from loraplex.cli.terminal import CommandError
from loraplex.contracts.broker.keys import key_account
from loraplex.contracts.broker.ledger import Ledger
from loraplex.contracts.broker.messages import AdapterRef
from loraplex.contracts.plans import NANO
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.metrics import RouterMetrics
from loraplex.router.quotas.quotas import NO_FACTS, Quotas
from loraplex.usage_events.log import UsageLog
from tests.accounts import account_of
from tests.plans_file import plans_in
from tests.router.recording_link import RecordingLink, frame, job

TOKENS = '"tenant": "a", "input_tokens": 2, "output_tokens": 1'
EVENT = '{"id": "r:0", "time": "2026-11-30T23:59:59Z", "data": {%s ' + TOKENS + "}}"
ADAPTER = "tenants/acme/adapters/support"
SUPPORT = f"{ADAPTER}/revisions/sha256:{'0' * 64}"
PLANS = """
[prices]
tiny = [150, 75, 600]
"tenants/acme/adapters/support" = [333, 1, 777]
[tenants.acme]
budget_per_month = 10
[keys.k1]
budget_per_month = 9
"""


def reported(month: str, *files: Path) -> list[dict[str, str]]:
    """Return the rows of a report."""
    result = CliRunner().invoke(app, ["usage", "report", "--month", month, *map(str, files)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return list(csv.DictReader(io.StringIO(result.stdout)))


async def test_a_months_csv_is_what_accounts_were_charged(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two routers that write files of their own, one of which is renamed, and has events that come twice."""
    (plans := tmp_path / "plans.toml").write_text(PLANS)
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    logs = [UsageLog(redis, file, RouterMetrics()) for file in files]
    routers = [Quotas(Ledger(redis), plans_in(plans), usage=log) for log in logs]
    chance = Random(5)
    for number in range(60):
        key_id, revision = chance.choice(["", "k1"]), chance.choice(["", SUPPORT])
        monkeypatch.setattr("loraplex.router.quotas.quotas.calling_key", lambda key_id=key_id: key_id)
        adapter = AdapterRef(revision, revision, 8, 1) if revision else None
        asked = replace(job(f"r{number}"), adapter=adapter)
        budget = await chance.choice(routers).reserve("acme", 2, 40, facts=NO_FACTS.of_job(asked))
        assert budget is not None
        (routed := RoutedJob(asked)).bind(RecordingLink("w"), 1)
        routed.accept(frame(0, 7))
        routed.cached_tokens, delivered = chance.randint(0, 2), chance.randint(0, 40)
        budget.jobs.append(routed)
        budget.delivered = lambda delivered=delivered: delivered
        await budget.settle()
        if number == 30:
            await logs[0].write()
            files.append(files[0].rename(tmp_path / "a.jsonl.1"))
        await chance.choice(logs).write()
    again = files[1].read_text().splitlines()[:3]
    with files[2].open("a") as renamed:
        renamed.write("\n".join([*again, again[0][:40]]) + "\n")  # and a torn line

    lines = [line for file in files for line in file.read_text().splitlines() if line.endswith("}}")]
    events = {event["id"]: event for event in map(json.loads, lines)}
    assert (len(events), len(lines)) == (60, 63)
    rows = [row for month in {one["time"][:7] for one in events.values()} for row in reported(month, *files)]
    assert {(row["key"], row["adapter"]) for row in rows} == {
        ("", ""), ("", ADAPTER), ("k1", ""), ("k1", ADAPTER)
    }  # fmt: skip
    for column in ("input_tokens", "cached_tokens", "output_tokens"):
        assert sum(int(row[column]) for row in rows) == sum(one["data"][column] for one in events.values())
    assert sum(int(row["requests"]) for row in rows) == 60
    assert {row["currency"] for row in rows} == {"EUR"}
    with_key, with_adapter = ([row for row in rows if row[column]] for column in ("key", "adapter"))
    for account, of_account in (("acme", rows), (key_account("k1"), with_key), (ADAPTER, with_adapter)):
        charged = await account_of(redis, account)
        assert charged["month_tokens"] == sum(
            int(one["input_tokens"]) + int(one["output_tokens"]) for one in of_account
        )
        assert charged["month_cost"] == sum(Decimal(row["cost"]) for row in of_account) * NANO


def test_of_two_events_with_an_id_the_larger_counts_in_its_own_month(tmp_path: Path) -> None:
    def event(time: str, output: int) -> str:
        data = {"tenant": "acme", "model": "tiny", "input_tokens": 2, "output_tokens": output, "seconds": 0.1}
        return json.dumps({"id": "r:0", "time": time, "type": "loraplex.usage.v1", "data": data}) + "\n"

    (file := tmp_path / "a.jsonl").write_text(
        event("2026-11-30T23:59:59.999+00:00", 5)
        + event("2026-12-01T00:30:00.000+01:00", 9)
        + event("2026-11-30T23:59:59.999+00:00", 7)
    )
    (row,) = reported("2026-11", file)
    assert (row["output_tokens"], row["requests"], row["cost"], row["currency"]) == ("9", "1", "", "")
    assert reported("2026-12", file) == []


@pytest.mark.parametrize(
    ("month", "line", "message"),
    [
        ("2026-13", "", "--month 2026-13: write it as 2026-11"),
        ("2026-11", '{"id": "r:0"}', "a.jsonl: line 1 is not a usage event: Object missing required field `time`"),
        ("2026-11", EVENT % '"cost": "x",', "a.jsonl: line 1 is not a usage event: 'x' is not an amount of money"),
        ("2026-11", EVENT % '"cost": "0.0000000001",', "'0.0000000001' is not an amount of money"),
    ],
)
def test_what_is_no_event_is_named(tmp_path: Path, month: str, line: str, message: str) -> None:
    (file := tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(CommandError, match=re.escape(message)):
        reported(month, file)
