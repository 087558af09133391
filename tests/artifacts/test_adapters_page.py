"""docs/reference/adapter-files.md has every field of a LoRA configuration that the code and peft know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.artifacts import MismatchError
from loraplex.contracts.artifacts.peft_config import ACCEPTED, WHY_REFUSED, parse_peft_config

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "adapter-files.md"


# An example of each accepted field, and examples of refused ones with the error's message.
SERVED: dict[str, Any] = {
    "r": 16,
    "lora_alpha": 32,
    "rank_pattern": {"down_proj": 32, "layers\\.0\\..*": 4},
    "alpha_pattern": {"q_proj": 8},
    "use_rslora": True,
    "use_dora": True,
    "alora_invocation_tokens": [5, 7],
    "fan_in_fan_out": True,
    "base_model_name_or_path": "some/model",
    "peft_type": "LORA",
    "task_type": "SEQ_CLS",
    "modules_to_save": ["classifier", "score"],
    "trainable_token_indices": [5, 7],
    "id2label": {"0": "negative", "1": "positive"},
    "bias": "none",
    "init_lora_weights": "gaussian",
    "loraplex_chat": {"system_prompt": "You are brief."},
    "loraplex_max_tokens": 512,
    "loraplex_tokens": [{"id": 151665, "content": "<call>", "special": True}],
    "loraplex_end_tokens": ["</turn>", 151643],
    "loraplex_certificate_prompts": [{"messages": [{"role": "user", "content": "Is 7 prime?"}], "answer": "yes"}],
    "target_modules": "all-linear",
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "exclude_modules": ["v_proj"],
    "layers_to_transform": [0, 2],
    "layers_pattern": "layers",
    "lora_dropout": 0.1,
    "inference_mode": True,
    "peft_version": "0.21.2",
    "revision": "main",
    "auto_mapping": {"base_model_class": "LlamaForCausalLM"},
    "unsloth_fixed": True,
    "unsloth_version": "2026.3.3",
    "lora_dtype": "bfloat16",
    "lorap_lr_ratio": 16.0,
    "lorap_emb_lr": 1e-06,
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
    "runtime_config": {"ephemeral_gpu_offload": False},
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "ipm"},
    "loftq_config": {"loftq_bits": 4},
    "lora_ga_config": {"direction": "ArB2r"},
}
_CONVERT = (
    "changed the base model's weights; convert it to plain LoRA with peft's "
    "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
)
_IN_WORDS = "was replaced in peft: put its token ids, of the base's tokenizer, into alora_invocation_tokens"
REFUSED: list[tuple[str, Any, str]] = [
    ("peft_type", "ADALORA", "'ADALORA' is not served, only 'LORA'; train plain LoRA"),
    (
        "peft_type",
        "LOHA",
        (
            "'LOHA' is not served, only 'LORA'; peft's save_as_lora(DIR, model, rank=64) makes a LoRA that is "
            "close to it"
        ),
    ),
    ("task_type", "TOKEN_CLS", "'TOKEN_CLS' is not served, only 'CAUSAL_LM', 'SEQ_CLS', 'FEATURE_EXTRACTION'"),
    ("bias", "lora_only", "'lora_only' is not served, only 'none'"),
    ("init_lora_weights", "pissa", f"'pissa' {_CONVERT}"),
    ("init_lora_weights", "olora", f"'olora' {_CONVERT}"),
    ("init_lora_weights", "corda", f"'corda' {_CONVERT}"),
    ("init_lora_weights", "loftq", f"'loftq' {_CONVERT}"),
    ("init_lora_weights", "lora_ga", f"'lora_ga' {_CONVERT}"),
    (
        "modules_to_save",
        ["norm"],
        (
            "a fully trained norm is not supported, only embeddings, lm_head, and classification heads "
            "(classifier, score, pooler, head)"
        ),
    ),
    ("ensure_weight_tying", True, "it ties an adapter's own embeddings and head to one weight; train without it"),
    ("lora_bias", True, "biases of LoRA layers are not served; train with lora_bias=False"),
    ("layer_replication", [[0, 4], [2, 5]], "replicated layers are not served; train on the base model as it is"),
    ("alora_invocation_string", "<check>", _IN_WORDS),
    ("invocation_string", "<check>", _IN_WORDS),
    ("arrow_config", {"top_k": 2}, "Arrow routes between adapters; push each as an adapter of its own"),
    ("kasa_config", {"beta": 0.1}, "KaSA changes how an adapter is applied; train plain LoRA"),
    ("monteclora_config", {"num_samples": 8}, "MonteCLoRA samples its weights; train plain LoRA"),
    ("velora_config", {"num_groups": 8}, "VeLoRA is not known to leave a plain LoRA adapter; train without it"),
    ("use_bdlora", {"nblocks": 2}, "block-diagonal LoRA is not served; train plain LoRA"),
    ("use_qalora", True, "QALoRA pools its inputs; train plain LoRA"),
    ("megatron_config", {"num_layers": 2}, "Megatron's parallel layers are not served; train on transformers' own"),
    ("field_of_tomorrow", 3, "this version does not know the field, and it is not at its default"),
]


def section(title: str) -> str:
    return PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def parse(field: str, value: Any) -> None:
    parse_peft_config(json.dumps({"peft_type": "LORA", "r": 8} | {field: value}).encode())


@pytest.mark.parametrize(("field", "example"), SERVED.items())
def test_accepted_fields(field: str, example: Any) -> None:
    parse(field, example)


@pytest.mark.parametrize(("field", "example", "text"), REFUSED)
def test_refused_fields(field: str, example: Any, text: str) -> None:
    with pytest.raises(MismatchError) as caught:
        parse(field, example)
    assert (caught.value.subject, caught.value.message) == (field, text)


def test_the_page_has_every_field_that_the_code_knows() -> None:
    refused = {field for field, _, _ in REFUSED}
    assert set(SERVED) == ACCEPTED
    assert refused >= set(WHY_REFUSED)
    assert not ACCEPTED & set(WHY_REFUSED)
    assert [field for field in SERVED if f"`{field}`" not in section("Accepted fields")] == []
    assert [field for field in refused if f"`{field}`" not in section("Refused fields")] == []


def test_the_page_has_every_field_that_peft_knows() -> None:
    """A field of a later peft has to be understood, and entered here, before it is served."""
    peft = pytest.importorskip("peft")
    assert set(peft.LoraConfig.__dataclass_fields__) <= {*SERVED, *(field for field, _, _ in REFUSED)}
