from __future__ import annotations

import json
import math
from typing import Any

import pytest

from loraplex.contracts.artifacts import ArtifactError, MismatchError
from loraplex.contracts.artifacts.activation import last_occurrence
from loraplex.contracts.artifacts.peft_config import PeftConfig, parse_name_patterns, parse_peft_config

# Fields that peft 0.21 writes for LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"], task_type="CAUSAL_LM").
WRITTEN: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "tiny", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 16, "lora_bias": False, "lora_dropout": 0.0,
    "lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 8,
    "rank_pattern": {}, "revision": None, "target_modules": ["q_proj"], "target_parameters": None,
    "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip
MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 11)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
]


def parse(**changes: Any) -> PeftConfig:
    return parse_peft_config(json.dumps(WRITTEN | changes).encode())


def test_reads_what_peft_writes() -> None:
    config = parse()
    assert (config.rank, config.alpha, config.max_rank, config.base_model) == (8, 16.0, 8, "tiny")
    assert config.scaling_of("model.layers.0.self_attn.q_proj", 8) == 2.0


@pytest.mark.parametrize(
    "changes",
    [
        {  # unsloth
            "auto_mapping": {
                "base_model_class": "LlamaForCausalLM",
                "parent_library": "transformers.models.llama.modeling_llama",
                "unsloth_fixed": True,
            },
            "target_modules": r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|v_proj).*?)",
            "task_type": None,
        },
        {"revision": "main", "loftq_config": None, "lora_dropout": 0.05},  # axolotl
        {"base_model_name_or_path": "/root/models/tiny", "target_modules": ["down_proj", "q_proj"]},  # LLaMA-Factory
        {"lora_dtype": "bfloat16", "lorap_lr_ratio": None, "lorap_emb_lr": 1e-6},  # ms-swift
    ],
)
def test_reads_what_other_trainers_write(changes: dict[str, Any]) -> None:
    assert parse(**changes).rank == 8


def test_reads_the_fewest_fields() -> None:
    config = parse_peft_config(b'{"peft_type": "LORA", "r": 4}')
    assert (config.rank, config.alpha) == (4, 8.0)


def test_ranks_and_scalings_follow_the_patterns() -> None:
    config = parse(rank_pattern={"k_proj": 2, "layers.1.q_proj": 32}, alpha_pattern={"k_proj": 5})
    assert config.max_rank == 32
    assert config.rank_of("model.layers.0.k_proj") == 2
    assert config.rank_of("model.layers.1.q_proj") == 32
    assert config.rank_of("model.layers.0.q_proj") == 8
    assert config.scaling_of("model.layers.0.k_proj", 2) == 2.5
    assert config.scaling_of("model.layers.1.q_proj", 32) == 0.5


def test_rslora_scales_with_the_root_of_the_rank() -> None:
    assert parse(use_rslora=True).scaling_of("q_proj", 8) == 16 / math.sqrt(8)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.q_proj"},
        {"target_modules": None},
        {"exclude_modules": ["k_proj"]},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"fan_in_fan_out": True},
        {"lora_dropout": 0.1},
        {"task_type": None},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"lora_alpha": 0.5},
        {"rank_pattern": None},
        {"a_field_of_tomorrow": None},
        {"another": False, "and": {}, "so": [], "on": ""},
    ],
)
def test_accepts_what_changes_nothing_or_is_served(changes: dict[str, Any]) -> None:
    parse(**changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "all"),
        ("bias", "lora_only"),
        ("bias", None),
        ("modules_to_save", ["norm"]),
        ("trainable_token_indices", [1, 1]),
        ("layer_replication", [[0, 4], [2, 5]]),
        ("lora_bias", True),
        ("use_qalora", True),
        ("alora_invocation_string", "<check>"),
        ("megatron_config", {"x": 1}),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 2}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"a": 1}),
        ("velora_config", {"a": 1}),
        ("ensure_weight_tying", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "of_tomorrow"),
        ("init_lora_weights", ["gaussian"]),
        ("peft_type", "ADALORA"),
        ("peft_type", None),
        ("task_type", "TOKEN_CLS"),
        ("task_type", ["CAUSAL_LM"]),
        ("a_field_of_tomorrow", 3),
    ],
)
def test_refuses_by_name_what_is_not_served(field: str, value: Any) -> None:
    with pytest.raises(MismatchError) as caught:
        parse(**{field: value})
    assert caught.value.subject == field


def test_says_how_to_convert_what_rewrote_the_base() -> None:
    with pytest.raises(MismatchError, match="path_initial_model_for_weight_conversion"):
        parse(init_lora_weights="pissa")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", True),
        ("r", 8.0),
        ("r", "8"),
        ("lora_alpha", "16"),
        ("lora_alpha", None),
        ("lora_alpha", 10**40),
        ("use_rslora", "yes"),
        ("rank_pattern", [1]),
        ("rank_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"q_proj": None}),
    ],
)
def test_refuses_values_that_are_none(field: str, value: Any) -> None:
    with pytest.raises(ArtifactError) as caught:
        parse(**{field: value})
    assert caught.value.subject.startswith(field)
    assert not isinstance(caught.value, MismatchError)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"\xff", b'{"r": NaN}', b'{"r": 1e999}', b'{"r":1,"r":2}', b"[" * 99999]
)
def test_refuses_what_is_not_json(data: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"^adapter_config\.json: "):
        parse_peft_config(data)


def test_a_rank_must_be_there() -> None:
    with pytest.raises(ArtifactError, match="r: is missing"):
        parse_peft_config(b'{"peft_type": "LORA"}')


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
    from peft.utils.other import get_pattern_key

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


def test_a_pattern_for_a_model_with_images_names_the_modules_of_its_text_part() -> None:
    patterns = parse_name_patterns("alpha_pattern", {r"model.language_model\.layers.0.q_proj": 5})
    assert [patterns.value_of(f"model.layers.{layer}.q_proj", 1) for layer in (0, 1)] == [5, 1]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"alora_invocation_tokens": "<check>"}, "is not a list of token ids"),
        ({"alora_invocation_tokens": [5, -1]}, "is not a list of token ids"),
        ({"alora_invocation_tokens": []}, "has 0 ids; 1 to 64 are served"),
        ({"alora_invocation_tokens": [5] * 65}, "has 65 ids; 1 to 64 are served"),
        ({"alora_invocation_tokens": [5], "use_dora": True}, "cannot be combined with use_dora; train without one"),
        ({"alora_invocation_tokens": [5], "task_type": "SEQ_CLS"}, "is served for task_type 'CAUSAL_LM' alone"),
    ],
)
def test_an_invocation_that_is_not_served_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ArtifactError, match=f"alora_invocation_tokens: {text}"):
        parse(**changes)
    assert parse(alora_invocation_tokens=[5, 7]).invocation == (5, 7)


def test_the_last_occurrence_of_an_invocation_counts() -> None:
    for ids, prompt, at in (
        ((5, 7), (5, 7, 1, 5, 7, 5), 3),
        ((5, 5), (5, 5, 5), 1),
        ((5,), (5,), 0),
        ((5, 7), (5, 1, 7), None),
        ((5, 7), (7,), None),
    ):
        assert last_occurrence(ids, prompt) == at


def test_a_hostile_prompt_is_searched_in_linear_time() -> None:
    compared = 0

    class Token(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return isinstance(other, int) and int(self) == int(other)

    count = 1_000
    for ids in ((5,) * 63 + (7,), (7,) + (5,) * 63, (5,) * 32 + (7,) + (5,) * 31):
        assert last_occurrence(tuple(map(Token, ids)), tuple(Token(5) for _ in range(count))) is None
    assert compared < 3 * 2 * count
