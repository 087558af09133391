"""Patterns of revisions from before the store resolved them: a process that may be ended does it at their load."""

from __future__ import annotations

import json

import pytest

from artifacts.errors import MismatchError
from artifacts.peft_config import PeftConfig, parse_peft_config
from artifacts.resolve_patterns import with_names

MODULES = [
    f"model.layers.{layer}.{room}_{'x' * 40}.{name}_proj"
    for layer in range(100)
    for room in ("self_attn", "mlp")
    for name in "qkvoudg"
]


def config(**fields: object) -> PeftConfig:
    return parse_peft_config(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2} | fields).encode())


def test_names_are_left_as_they_are() -> None:
    given = config(alpha_pattern={"q_proj": 8})
    assert with_names(given, MODULES) is given


def test_expressions_become_names() -> None:
    found = with_names(config(alpha_pattern={r".*\.1[.].*q_proj": 8}, rank_pattern={"[kv]_proj": 4}), MODULES)
    assert found == config(alpha_pattern={r".*\.1[.].*q_proj": 8}, rank_pattern={"[kv]_proj": 4}).resolved(MODULES)
    assert found.scaling_of(MODULES[14], 4) == 2
    assert [found.rank_of(name) for name in MODULES[:3]] == [2, 4, 4]


def test_what_takes_too_long_is_refused() -> None:
    with pytest.raises(MismatchError, match="take too long"):
        with_names(config(alpha_pattern={f".*.*{number}": 1 for number in range(256)}), MODULES, cpu_s=0.2)
