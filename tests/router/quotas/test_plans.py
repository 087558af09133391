"""The plans of a router: whose limits a call has, and that a change of the file holds without a restart."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from broker.terms import NO_KEY, KeyTerms
from router.quotas.plans import Plans
from telemetry.metrics import Meters
from tenancy.audit_log import AuditCounts, AuditLog
from tenancy.plans import Plan

FILE = """
[default]
requests_per_minute = 60
[tenants.acme]
tokens_per_day = 2_000_000
weight = 2.5
queue_share = 0.25
[tenants.globex]
[keys.k1]
tokens_per_day = 1_000
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "plans.toml"
    path.write_text(FILE)
    return path


def test_a_tenant_has_its_own_plan_or_the_default(path: Path) -> None:
    plans = Plans(path)
    weight_of = plans.weights_over({"acme": 7.0, "globex": 3.0})
    assert plans.of("acme") == Plan(tokens_per_day=2_000_000, weight=2.5, queue_share=0.25)
    assert plans.limits_of("acme") == {"tokens_per_day": 2_000_000}
    assert plans.limits_of("other") == {"requests_per_minute": 60}
    assert plans.limits_of("globex") == {}
    assert (plans.queue_share_of("acme"), plans.queue_share_of("other")) == (0.25, 1.0)
    assert plans.has_limits
    assert [weight_of(tenant) for tenant in ("acme", "globex", "other")] == [2.5, 3.0, 1.0]
    assert not Plans().has_limits
    assert Plans().limits_of("acme") == {}


async def test_a_change_is_read_and_a_faulty_one_is_not(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plans, write = Plans(path), path.write_text
    write("[tenants.acme]\nconcurrent_streams = 3\n")
    await plans.look()
    assert plans.limits_of("acme") == {"concurrent_streams": 3}
    assert plans.limits_of("other") == {}
    write("[tenants.acme]\nconcurrent_streams = many\n")
    await plans.look()
    os.unlink(path)
    await plans.look()
    await plans.look()
    assert plans.limits_of("acme") == {"concurrent_streams": 3}
    assert len([record for record in caplog.records if "the former plans stay" in record.message]) == 2
    write(FILE)
    os.utime(path)
    await plans.look()
    assert plans.of("acme").weight == 2.5


async def test_a_change_of_the_file_is_in_the_audit_log(path: Path, tmp_path: Path) -> None:
    log_path, write = tmp_path / "audit", path.write_text
    plans, audit = Plans(path), AuditLog(str(log_path), "router", AuditCounts(Meters()))
    plans.record = audit.record
    await plans.look()
    text = FILE.replace("= 60", "= 30").replace("[tenants.globex]", "[tenants.other]")
    write(text)
    await plans.look()
    write(text + "# nothing else\n")
    await plans.look()
    audit.close()
    read = log_path.read_text
    records = [json.loads(line) for line in read().splitlines()]
    found = [(one["file"], one["plans"]) for one in records if one["event"] == "plans file"]
    assert found == [(str(path), ["default", "tenants/globex", "tenants/other"])]


def test_a_call_must_fit_its_keys_plan_and_its_tenants(path: Path) -> None:
    plans = Plans(path)
    assert [owner.name for owner in plans.owners("acme", "k1")] == ["keys/k1", "tenants/acme"]
    assert [owner.name for owner in plans.owners("acme", "k2")] == ["tenants/acme"]
    assert plans.limits_of("keys/k1") == {"tokens_per_day": 1_000}
    assert plans.limits_of("keys/k2") == {}
    assert [plans.key_terms(key) for key in ("k1", "k2", "")] == [NO_KEY] * 3
    assert set(plans.accounts) == {"acme", "globex", "keys/k1"}


def test_a_key_may_have_a_share_of_its_tenants_queue_and_a_weight(path: Path) -> None:
    path.write_text("[keys.k1]\nqueue_share = 0.5\n[keys.k2]\nweight = 3\n[keys.k3]\nweight = 2.5\nqueue_share = 0.1\n")
    plans = Plans(path)
    terms = [KeyTerms("k1", 0.0, 0.5), KeyTerms("k2", 3.0, 1.0), KeyTerms("k3", 2.5, 0.1)]
    assert [plans.key_terms(key) for key in ("k1", "k2", "k3")] == terms
    assert not plans.has_limits
