"""Tiny random float32 models of every family, and transformers' own choices after a few prompts.

Their windows are shorter than the prompts, and in CRAMPED blocks sequences are preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.families import FAMILIES
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine_api import AdapterSource, NewSequence

VOCAB, WINDOW, NEW_TOKENS = 112, 6, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
# Fields of a mixture of experts under every family's names; each config takes those that it knows.
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "n_shared_experts": 1, "moe_num_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
}  # fmt: skip
WINDOWED: dict[str, Any] = {
    "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4,
}  # fmt: skip
# Fields that make a family's own paths run, where the sizes alone do not.
OWN: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": True},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gemma2": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": ["full_attention"] * 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "qwen2": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                  "original_max_position_embeddings": 32}},
    "glm4_moe_lite": LATENT,
    "minicpm3": LATENT,
    "youtu": LATENT,
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {"use_parallel_residual": True, "qk_layernorm": True},
    "vaultgemma": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
}  # fmt: skip
ADAPTED = ["deepseek_v3", "gemma2", "gpt2", "gpt_neox", "mixtral", "opt", "phi3"]
FIRST = (7, 21, 90, 33, 64, 5, 12, 71, 28, 44, 100, 9, 52, 87, 16, 3, 60, 41, 75, 30, 11)
PROMPTS = [FIRST, (101, 4, 8), (17, 55, 23, 42, 90, 66, 8, 31, 13), (*FIRST[:17], 80, 6)]
LAST_ARRIVAL = 6
# The two that begin alike.
TUNED = (0, 3)
CRAMPED = {"rows": 4, "kv_blocks": 17, "block_size": 4, "step_tokens": 10, "adapter_slots": 2, "max_rank": 4}


@dataclass
class Tiny:
    """A saved model; where it has an adapter, the answers to PROMPTS: with it to the first and the last."""

    directory: Path
    adapter: Path | None
    answers: list[tuple[int, ...]]
    # The model as transformers has it, where there is no adapter.
    model: Any = None
    # The mean of the first prompt's hidden states.
    mean: Any = None


def make_config(model_type: str) -> Any:
    from transformers import AutoConfig

    wanted = SIZES | (EXPERTS if FAMILIES[model_type].experts else {})
    own = AutoConfig.for_model(model_type)
    fields = set(own.to_dict()) | set(own.attribute_map)
    if "sliding_window" in fields:
        wanted = wanted | WINDOWED
    if "kv_lora_rank" in fields:
        wanted = {name: value for name, value in wanted.items() if name != "head_dim"}
    # Only what the family knows: a config takes any field, and a real one would not have it.
    known = {name: value for name, value in wanted.items() if name in fields}
    return AutoConfig.for_model(model_type, **known | OWN.get(model_type, {}))


def wide_config(model_type: str) -> Any:
    """A config whose rows are whole vectors: torch's operators have other bits in what is left over."""
    config = make_config(model_type)
    wide = {
        "hidden_size": 64,
        "head_dim": 16,  # as the tiny models of tests.tiny_models have: kernels are compiled for it
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "n_routed_experts": 32,
        "max_position_embeddings": 512,
    }
    if hasattr(config, "kv_lora_rank"):
        del wide["head_dim"]  # follows from those of latent attention
    for name, size in wide.items():
        if hasattr(config, name):
            setattr(config, name, size)
    return config


def make_model(config: Any, directory: Path) -> Any:
    """A model, saved and loaded. Its weights matter: norms near one, the rest so large that answers are diverse."""
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    torch.manual_seed(2)
    model = auto.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name or "ln_" in name:
            parameter.data += 0.1 * values
        else:
            parameter.data.copy_(values * (0.2 if parameter.ndim == 1 else 2.5 / parameter.shape[-1] ** 0.5))
    embeddings = model.get_input_embeddings().weight
    embeddings.data.copy_(torch.randn(embeddings.shape, generator=generator))
    model.save_pretrained(directory)
    return auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def answer(model: Any, prompt: tuple[int, ...], margin: float = 1e-5) -> tuple[int, ...]:
    """The greedy ids, and the assertion that no choice was close."""
    import torch

    with torch.inference_mode():
        output = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    best = torch.stack([step[0] for step in output.logits]).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > margin
    return tuple(output.sequences[0, len(prompt) :].tolist())


def check_answer(model: Any, prompt: tuple[int, ...], ids: tuple[int, ...], margin: float = 1e-5) -> None:
    """Assert that each id is the model's choice after those before it, and that no choice was close.

    One pass over the whole answer says what generating it would.
    """
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([(*prompt, *ids[:-1])]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.topk(2)
    assert tuple(best.indices[:, 0].tolist()) == ids
    assert (best.values[:, 0] - best.values[:, 1]).min() > margin


def make_tiny(model_type: str, directory: Path, save_adapter: Callable[..., None]) -> Tiny:
    import torch

    model = make_model(make_config(model_type), directory / "model")
    with torch.inference_mode():
        mean = model.base_model(input_ids=torch.tensor([PROMPTS[0]])).last_hidden_state[0].mean(0)
    if model_type not in ADAPTED:
        return Tiny(directory / "model", None, [], model, mean)
    return replace(with_adapter(model, model_type, directory, save_adapter), mean=mean)


def adaptable_modules(directory: Path, model_type: str) -> list[str]:
    """The modules that adapters of a saved model are of.

    Of a mixture of experts the attention's: test_expert_adapters.py has adapters of the experts.
    """
    modules = [one.name for one in read_base_model(str(directory)).modules]
    return [name for name in modules if not FAMILIES[model_type].experts or ".self_attn." in name]


def with_adapter(
    model: Any,
    model_type: str,
    directory: Path,
    save_adapter: Callable[..., None],
    change: Callable[[Any], object] = lambda model: None,
    margin: float = 1e-5,
) -> Tiny:
    """The answers of a model that is saved in directory/model, of TUNED with an adapter on every layer.

    `change` changes the model's weights once peft has made the adapter, and put its copies of embeddings and head back.
    """
    from peft import PeftModel

    family, chosen = FAMILIES[model_type], adaptable_modules(directory / "model", model_type)
    adapter = directory / "adapter"
    save_adapter(model, adapter, 3, r=4, lora_alpha=4, target_modules=chosen, fan_in_fan_out=family.input_first)
    tuned = PeftModel.from_pretrained(model, adapter)
    change(tuned.get_base_model())
    with tuned.disable_adapter():
        answers = [answer(tuned, prompt, margin) for prompt in PROMPTS]
    for index in TUNED:
        plain, answers[index] = answers[index], answer(tuned, PROMPTS[index], margin)
        assert plain != answers[index], "the adapter was to change the answer"
    return Tiny(directory / "model", adapter, answers)


def requests_of(tiny: Tiny) -> list[NewSequence]:
    source = AdapterSource("the adapter", str(tiny.adapter)) if tiny.adapter else None
    return [
        NewSequence(
            str(index),
            prompt,
            adapter=source if index in TUNED else None,
            stopping=StoppingParams(max_tokens=NEW_TOKENS),
        )
        for index, prompt in enumerate(PROMPTS)
    ]
