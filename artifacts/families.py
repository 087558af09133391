"""The model families that are served: those whose answers were compared with transformers' own generate.

Store and routers read from this table what may be registered and which modules adapters can change, workers what to
load. tests/worker/engine/model/test_architectures.py checks every line.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# The last part of the names of token embeddings; the output head's name, and its weight's names in checkpoints.
_EMBEDDINGS = frozenset({"embed_tokens", "embed_in", "wte", "word_embeddings", "tok_embeddings"})
HEAD = "lm_head"
HEAD_WEIGHTS = frozenset({"lm_head.weight", "embed_out.weight"})


def is_embedding(module: str) -> bool:
    """Return whether a module of this name is a model's token embeddings."""
    return module.rpartition(".")[2] in _EMBEDDINGS


def is_head(module: str) -> bool:
    """Return whether a module of this name is the output head."""
    return module == HEAD


def is_inner(module: str) -> bool:
    """Return whether a module of this name is neither token embeddings nor output head."""
    return not (is_embedding(module) or is_head(module))


class KeyValues(Enum):
    """The way in which a family's attention makes keys and values; it decides which config fields give their shape."""

    # num_key_value_heads (by default all heads) of head_dim (by default hidden_size / heads).
    GROUPED = "grouped"
    # Each head has its own, of hidden_size / heads; other fields are not read.
    PER_HEAD = "per head"
    # With multi_query one head for all, of hidden_size / heads.
    MULTI_QUERY = "multi query"
    # transformers expands a latent vector to keys and values of every head.
    LATENT = "latent"


@dataclass(frozen=True, slots=True)
class Family:
    """A `model_type` of transformers. `architecture` is the class that config.json names.

    `prefix` begins the names of all weights but the output head's; checkpoints saved without the head lack it.
    `experts` marks a mixture of experts: adapters change neither the experts nor their router. `input_first` says that
    linear weights are stored as (in_features, out_features).
    """

    model_type: str
    architecture: str
    title: str
    prefix: str = "model"
    experts: bool = False
    input_first: bool = False
    key_values: KeyValues = KeyValues.GROUPED


_FAMILIES = (
    Family("apertus", "ApertusForCausalLM", "Apertus"),
    Family("arcee", "ArceeForCausalLM", "Arcee AFM"),
    Family("cohere", "CohereForCausalLM", "Command R"),
    Family("cohere2", "Cohere2ForCausalLM", "Command R7B, Command A"),
    Family("cohere2_moe", "Cohere2MoeForCausalLM", "Command, mixture of experts", experts=True),
    Family("cwm", "CwmForCausalLM", "Code World Model"),
    Family("deepseek_v2", "DeepseekV2ForCausalLM", "DeepSeek V2", experts=True, key_values=KeyValues.LATENT),
    Family("deepseek_v3", "DeepseekV3ForCausalLM", "DeepSeek V3, R1", experts=True, key_values=KeyValues.LATENT),
    Family("dots1", "Dots1ForCausalLM", "dots.llm1", experts=True),
    Family("ernie4_5", "Ernie4_5ForCausalLM", "ERNIE 4.5"),
    Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "ERNIE 4.5 MoE", experts=True),
    Family("exaone4", "Exaone4ForCausalLM", "EXAONE 4"),
    Family("exaone_moe", "ExaoneMoeForCausalLM", "K-EXAONE", experts=True),
    Family("flex_olmo", "FlexOlmoForCausalLM", "FlexOlmo", experts=True),
    Family("gemma", "GemmaForCausalLM", "Gemma"),
    Family("gemma2", "Gemma2ForCausalLM", "Gemma 2"),
    Family("gemma3_text", "Gemma3ForCausalLM", "Gemma 3, text models"),
    Family("glm", "GlmForCausalLM", "GLM-4 (2024)"),
    Family("glm4", "Glm4ForCausalLM", "GLM-4 (0414)"),
    Family("glm4_moe", "Glm4MoeForCausalLM", "GLM-4.5, 4.6", experts=True),
    Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", "GLM-4.7 Flash", experts=True, key_values=KeyValues.LATENT),
    Family("gpt2", "GPT2LMHeadModel", "GPT-2", prefix="transformer", input_first=True, key_values=KeyValues.PER_HEAD),
    Family(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        "StarCoder, SantaCoder",
        prefix="transformer",
        key_values=KeyValues.MULTI_QUERY,
    ),
    Family("gpt_neox", "GPTNeoXForCausalLM", "Pythia, GPT-NeoX", prefix="gpt_neox", key_values=KeyValues.PER_HEAD),
    Family("gpt_oss", "GptOssForCausalLM", "gpt-oss", experts=True),
    Family("granite", "GraniteForCausalLM", "Granite 3"),
    Family("granite_swa", "GraniteSWAForCausalLM", "Granite, sliding windows"),
    Family("granitemoe", "GraniteMoeForCausalLM", "Granite 3 MoE", experts=True),
    Family("granitemoe_swa", "GraniteMoeSWAForCausalLM", "Granite MoE, sliding windows", experts=True),
    Family("granitemoeshared", "GraniteMoeSharedForCausalLM", "Granite MoE, shared experts", experts=True),
    Family("helium", "HeliumForCausalLM", "Helium"),
    Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "Hunyuan, dense"),
    Family("hyperclovax", "HyperCLOVAXForCausalLM", "HyperCLOVA X"),
    Family("jais2", "Jais2ForCausalLM", "Jais 2"),
    Family("llama", "LlamaForCausalLM", "Llama 2, 3 and what is shaped like them"),
    Family("mellum", "MellumForCausalLM", "Mellum", experts=True),
    Family("minicpm3", "MiniCPM3ForCausalLM", "MiniCPM 3", key_values=KeyValues.LATENT),
    Family("minimax_m2", "MiniMaxM2ForCausalLM", "MiniMax M2", experts=True),
    Family("ministral", "MinistralForCausalLM", "Ministral"),
    Family("ministral3", "Ministral3ForCausalLM", "Ministral 3, text models"),
    Family("mistral", "MistralForCausalLM", "Mistral"),
    Family("mixtral", "MixtralForCausalLM", "Mixtral", experts=True),
    Family("nanochat", "NanoChatForCausalLM", "nanochat"),
    Family("nemotron", "NemotronForCausalLM", "Nemotron, Minitron"),
    Family("olmo", "OlmoForCausalLM", "OLMo"),
    Family("olmo2", "Olmo2ForCausalLM", "OLMo 2"),
    Family("olmo3", "Olmo3ForCausalLM", "OLMo 3"),
    Family("olmoe", "OlmoeForCausalLM", "OLMoE", experts=True),
    Family("opt", "OPTForCausalLM", "OPT", key_values=KeyValues.PER_HEAD),
    Family("persimmon", "PersimmonForCausalLM", "Persimmon", key_values=KeyValues.PER_HEAD),
    Family("phi", "PhiForCausalLM", "Phi 1, 1.5, 2"),
    Family("phi3", "Phi3ForCausalLM", "Phi 3, 3.5, 4 (4k contexts; longrope is refused)"),
    Family("qwen2", "Qwen2ForCausalLM", "Qwen 1.5, 2, 2.5"),
    Family("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen 1.5, 2 MoE", experts=True),
    Family("qwen3", "Qwen3ForCausalLM", "Qwen 3"),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen 3 MoE", experts=True),
    Family("seed_oss", "SeedOssForCausalLM", "Seed-OSS"),
    Family("smollm3", "SmolLM3ForCausalLM", "SmolLM 3"),
    Family("solar_open", "SolarOpenForCausalLM", "Solar Open", experts=True),
    Family("stablelm", "StableLmForCausalLM", "StableLM"),
    Family("starcoder2", "Starcoder2ForCausalLM", "StarCoder 2"),
    Family("vaultgemma", "VaultGemmaForCausalLM", "VaultGemma"),
    Family("youtu", "YoutuForCausalLM", "Youtu-LLM", key_values=KeyValues.LATENT),
)
FAMILIES = {family.model_type: family for family in _FAMILIES}
