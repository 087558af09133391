"""The fields of plans: what they may be, and what they are refused for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.plans import FIELDS, Price, Prices, make_plan, money, nano
from loraplex.runtime.rpc.errors import InvalidField


def test_the_page_has_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs/guides/quotas.md").read_text()
    assert re.findall(r"^- `(\w+)`:", page, re.MULTILINE) == list(FIELDS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens_per_week": 1}, "tokens_per_week: not a field of a plan"),
        ({"tokens_per_day": -1}, "tokens_per_day: -1 is not a whole number from 0 to"),
        ({"priority_ceiling": -101}, "priority_ceiling: -101 is not a whole number from -100 to"),
        ({"tokens_per_day": 1.5}, "tokens_per_day: 1.5 is not a whole number"),
        ({"tokens_per_day": True}, "tokens_per_day: True is not a number"),
        ({"tokens_per_day": "many"}, "tokens_per_day: 'many' is not a number"),
        ({"weight": 0}, "weight: 0 is not from 0.001 to 1000"),
        ({"queue_share": 1.5}, "queue_share: 1.5 is not a share"),
        ({"weight": 0.0001}, "weight: 0.0001 is not from 0.001 to 1000"),
        ({"weight": -1}, "weight: -1 is not from 0.001 to 1000"),
        ({"queue_share": 0}, "queue_share: 0 is not a share"),
        ({"budget_per_month": -1}, "budget_per_month: -1 is not from 0 to 1000000 with at most 9 decimals"),
        ({"budget_per_month": float("nan")}, "budget_per_month: nan is not from 0"),
        ({"budget_warning": 1e-10}, "budget_warning: 1e-10 is not from 0 to 1000000 with at most 9 decimals"),
        (
            {"budget_per_month": 100, "budget_warning": 100.0},
            "budget_warning: 100.0 is not below budget_per_month, 100",
        ),
        ({"allowed_models": "qwen"}, "allowed_models: 'qwen' is not a list of names"),
        ({"allowed_models": 5}, "allowed_models: 5 is not a list of names"),
        ({"allowed_models": []}, "allowed_models: [] is not a list of names"),
        ({"allowed_models": ["qwen", 5]}, "allowed_models: ['qwen', 5] is not a list of names"),
        ({"allowed_models": ["qwen", ""]}, "allowed_models: '' is not allowed"),
        ({"allowed_models": ["../*"]}, "allowed_models: '../x' is not allowed"),
        ({"allowed_adapters": ["support@live"]}, "allowed_adapters: 'support@live' is not allowed"),
        ({"allowed_adapters": ["tenants/acme/support"]}, "allowed_adapters: 'tenants/acme/support' is not a name like"),
        ({"allowed_adapters": ["a" * 100] * 15}, "allowed_adapters: is longer than 1,500 characters"),
        ({"default_model": "large", "allowed_models": ["qwen*"]}, "default_model: large is not among allowed_models"),
    ],
)
def test_a_fault_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(f"tenants/acme.{message}")):
        make_plan("tenants/acme", values)


@pytest.mark.parametrize(("amount", "nanos"), [(0.1, 100_000_000), (1e-9, 1), (999_999.999999999, 999_999_999_999_999)])
def test_money_is_what_its_digits_say(amount: float, nanos: int) -> None:
    assert nano(amount) == nanos
    assert money(nanos) == f"{amount:.9f}"


def test_the_price_of_an_adapter_comes_before_its_models() -> None:
    own, base = Price(1, 1, 2), Price(3, 2, 4)
    prices = Prices("EUR", {"org/base": base, "tenants/acme/adapters/org/support": own})
    digest = "sha256:" + "0" * 64
    assert prices.of("org/base", f"tenants/acme/adapters/org/support/revisions/{digest}") == own
    assert prices.of("org/base", f"tenants/acme/adapters/other/revisions/{digest}") == base
    assert prices.of("org/base", digest) == base  # a weighted set
    assert (prices.of("org/base", ""), prices.of("other", "")) == (base, Price())


def test_a_list_may_have_patterns_and_full_names_or_nothing() -> None:
    lists = {"allowed_models": ["Qwen/*", "tiny"], "allowed_adapters": ["support-*", "tenants/shared/adapters/x"]}
    plan = make_plan("default", {"default_model": "Qwen/Qwen3-0.6B", **lists})
    assert (plan.allowed_models, plan.allowed_adapters) == tuple(map(tuple, lists.values()))
    assert not make_plan("default", {"allowed_adapters": ["-"]}).allows("allowed_adapters", "a")
