"""The fields of plans: what they may be, and what they are refused for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.plans import FIELDS, make_plan
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
    ],
)
def test_a_fault_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(f"tenants/acme.{message}")):
        make_plan("tenants/acme", values)
