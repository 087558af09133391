"""The plans file: what it says, what it is refused for, and that a change holds without a restart."""

from __future__ import annotations

import os
import re
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest

from broker.ledger import TokenLimits
from router.quotas.plans import Plan, Plans, PlansError

FILE = """
[default]
requests_per_minute = 60
[tenants.acme]
tokens_per_day = 2_000_000
weight = 2.5
[tenants.globex]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "plans.toml"
    path.write_text(FILE)
    return path


def test_a_tenant_has_its_own_plan_or_the_default(path: Path) -> None:
    plans = Plans(path)
    assert plans.of("acme") == Plan(tokens_per_day=2_000_000, weight=2.5)
    assert plans.limits_of("acme") == TokenLimits(tokens_per_day=2_000_000)
    assert plans.limits_of("other") == TokenLimits(requests_per_minute=60)
    assert plans.limits_of("globex") is None
    assert plans.has_limits
    assert (plans.weight_of("acme"), plans.weight_of("other")) == (2.5, None)
    assert not Plans().has_limits
    assert Plans().limits_of("acme") is None


def test_a_change_is_read_and_a_faulty_one_is_not(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plans = Plans(path)
    path.write_text("[tenants.acme]\nconcurrent_streams = 3\n")
    plans.look()
    assert plans.limits_of("acme") == TokenLimits(streams=3)
    assert plans.limits_of("other") is None
    path.write_text("[tenants.acme]\nconcurrent_streams = many\n")
    plans.look()
    path.unlink()
    plans.look()
    plans.look()
    assert plans.limits_of("acme") == TokenLimits(streams=3)
    assert len([record for record in caplog.records if "the former plans stay" in record.message]) == 2
    path.write_text(FILE)
    os.utime(path)
    plans.look()
    assert plans.of("acme").weight == 2.5


def test_the_page_has_an_example_and_every_field(path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/quotas.md").read_text()
    example = re.search(r"\$ cat plans.toml\n(.*?)\n    \$ ", page, re.DOTALL)
    assert example
    path.write_text(textwrap.dedent(example[1]))
    assert Plans(path).of("acme").weight == 3
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [field.name for field in fields(Plan)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tenants.acme]\ntokens_per_week = 1", "tenants.acme.tokens_per_week: not a field of a plan"),
        ("[tenants.acme]\ntokens_per_day = -1", "tenants.acme.tokens_per_day: -1 is not a whole number"),
        ("[tenants.acme]\ntokens_per_day = 1.5", "tenants.acme.tokens_per_day: 1.5 is not a whole number"),
        ("[default]\ntokens_per_day = true", "default.tokens_per_day: True is not a number"),
        ("[default]\nweight = 0", "default.weight: 0 is not above 0"),
        ("[Acme]", "Acme: write [default] or [tenants.NAME]"),
        ("tenants = 3", "tenants: write [tenants.NAME]"),
        ("[tenants]\nacme = 3", "tenants.acme: write [tenants.acme]"),
        ("[", "no TOML"),
    ],
)
def test_a_fault_is_named(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(PlansError, match=message.replace("[", r"\[").replace("]", r"\]")):
        Plans(path)
