from __future__ import annotations

import pytest
from peft.utils.other import get_pattern_key

from artifacts.errors import ArtifactError, MismatchError
from artifacts.name_patterns import parse_name_patterns

MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 11)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
]


@pytest.mark.model  # peft imports torch
@pytest.mark.parametrize(
    "patterns",
    [
        {},
        {"q_proj": 1, "k_proj": 2},
        {"proj": 1},
        {"model.layers.1.self_attn.q_proj": 1, "self_attn.q_proj": 2, "q_proj": 3},
        {"^model.layers.0.mlp.down_proj$": 1},
        {r"layers\.(0|11)\..*_proj": 1, "down_proj": 2},
        {r".*\.1\.mlp.*": 1},
        {r"layers\.\d+\.self_attn\.[qk]_proj": 1},
        {"q_proj|down_proj": 1},
    ],
)
def test_the_same_pattern_counts_as_in_peft(patterns: dict[str, int]) -> None:
    ours = parse_name_patterns("rank_pattern", patterns)
    names = ours.resolved(MODULES, 99)
    assert not names.has_expressions
    for module in MODULES:
        expected = patterns.get(get_pattern_key(list(patterns), module), 99)
        assert names.value_of(module, 99) == expected, module
        assert ours.has_expressions or ours.value_of(module, 99) == expected, module


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a|a)*b",
        "(a|a)(a|a)(a|a)b",
        ".*.*.*x",
        "(?=a)",
        r"(a)\1",
        "a{5}",
        "a" * 257,
        "naïve",
        "q_proj\n",
        "",
    ],
)
def test_what_could_run_for_long_is_refused(pattern: str) -> None:
    with pytest.raises(MismatchError, match=r"alpha_pattern: the pattern .* is too complex"):
        parse_name_patterns("alpha_pattern", {pattern: 1})


def test_what_is_no_expression_is_refused() -> None:
    with pytest.raises(ArtifactError, match="is not a regular expression"):
        parse_name_patterns("alpha_pattern", {"[a": 1}).resolved(MODULES, 2)


def test_a_name_that_is_the_end_of_another_keeps_its_own_value() -> None:
    names = parse_name_patterns("alpha_pattern", {"^lm_hea.$": 1}).resolved(["decoder.lm_head", "lm_head"], 2)
    assert [names.value_of(module, 2) for module in ("decoder.lm_head", "lm_head")] == [2, 1]


def test_expressions_are_not_evaluated_where_a_value_is_looked_up() -> None:
    """256 of them, each cubic in the length of a name, halted whoever asked."""
    patterns = parse_name_patterns("alpha_pattern", {f".*.*{number}": 1 for number in range(256)})
    assert patterns.has_expressions
    with pytest.raises(MismatchError, match="alpha_pattern: has regular expressions"):
        patterns.value_of(MODULES[0], 2)


def test_there_is_a_limit_to_how_many() -> None:
    names = {f"model.layers.{layer}.q_proj": 1 for layer in range(4096)}
    assert parse_name_patterns("rank_pattern", names).value_of("model.layers.7.q_proj", 0) == 1
    with pytest.raises(MismatchError, match="4097 patterns"):
        parse_name_patterns("rank_pattern", names | {"one.more": 1})
    with pytest.raises(MismatchError, match="more than 256 regular expressions"):
        parse_name_patterns("rank_pattern", {f".*{number}": 1 for number in range(257)})
