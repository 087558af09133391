"""The model families that are served: those whose answers were compared with transformers' own generate.

Store and routers read from this table what may be registered and which modules adapters can change, workers what to
load. tests/worker/engine/model/test_architectures.py checks every line.

The shape of keys and values is read from a config.json, for planning without the model; an engine measures it
(worker/engine/model/loader.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from loraplex.contracts.artifacts import ArtifactError

# The last part of the names of token embeddings; the output head's name, and its weight's names in checkpoints.
_EMBEDDINGS = frozenset({"embed_tokens", "embed_in", "wte", "word_embeddings", "tok_embeddings"})
HEAD = "lm_head"
HEAD_WEIGHTS = frozenset({"lm_head.weight", "embed_out.weight"})
# Name on command lines of a KV cache of 8 bits; by default it is in the dtype that the model computes in.
INT8 = "int8"
KV_CACHE_HELP = "int8: an 8-bit KV cache; empty: the model's dtype"
# Bytes of a scale. Not of 16 bits: it would save 2 of 68 bytes with 64 numbers, and lose numbers below 1e-5.
_SCALE_BYTES = 4

# Names that older families give a size; transformers writes a config with its family's own names.
_OLDER_NAMES = {
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "hidden_size": ("n_embd",),
    "max_position_embeddings": ("n_positions", "n_ctx"),
}


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
    `experts` marks a mixture of experts: adapters do not change its router. `input_first` says that linear weights are
    stored as (in_features, out_features), `experts_input_first` that those of each expert are.
    """

    model_type: str
    architecture: str
    title: str
    prefix: str = "model"
    experts: bool = False
    input_first: bool = False
    experts_input_first: bool = False
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
    Family("gpt_oss", "GptOssForCausalLM", "gpt-oss", experts=True, experts_input_first=True),
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


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of all layers; a key and a value of one head have key_dim and value_dim numbers."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers_per_token(self) -> int:
        """Return how many numbers one token's keys and values are, in all layers."""
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim)

    def token_bytes(self, number_bytes: int, kv_cache_dtype: str) -> int:
        """Return the bytes of one token's keys and values in all layers; the model computes in `number_bytes` each."""
        if kv_cache_dtype != INT8:
            return self.numbers_per_token * number_bytes
        return self.numbers_per_token + 2 * self.layers * self.kv_heads * _SCALE_BYTES


def check_kv_cache_dtype(name: str) -> str:
    """Return a dtype of the KV cache if it is known. Raises ArtifactError."""
    if name not in ("", INT8):
        raise ArtifactError(
            "--kv-cache-dtype", f"{name!r} is not {INT8}; leave it out for the dtype that the model computes in"
        )
    return name


def kv_shape(config: Mapping[str, Any]) -> KvShape:
    """Return the shape by the content of a config.json. Raises ArtifactError naming the field at fault.

    Only fields that the family reads count: others may stand in a config, and mean nothing.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    kind = family.key_values if family else KeyValues.GROUPED
    layers, heads = config_count(config, "num_hidden_layers"), config_count(config, "num_attention_heads")
    if kind is KeyValues.LATENT:
        key_dim = config_count(config, "qk_nope_head_dim") + config_count(config, "qk_rope_head_dim")
        return KvShape(layers, heads, key_dim, config_count(config, "v_head_dim"))
    kv_heads, head_dim = heads, None
    if kind is KeyValues.GROUPED:
        kv_heads = _optional_count(config, "num_key_value_heads") or heads
        head_dim = _optional_count(config, "head_dim")
    elif kind is KeyValues.MULTI_QUERY and config.get("multi_query", True):
        kv_heads = 1
    head_dim = head_dim or config_count(config, "hidden_size") // heads
    return KvShape(layers, kv_heads, head_dim, head_dim)


def _optional_count(config: Mapping[str, Any], key: str) -> int | None:
    return None if config.get(key) is None else config_count(config, key)


def config_count(config: Mapping[str, Any], key: str, file: str = "config.json") -> int:
    """Read a whole number from 1, under its own or an older name. Raises ArtifactError."""
    name = next((name for name in (key, *_OLDER_NAMES.get(key, ())) if config.get(name) is not None), key)
    value = config.get(name)
    if type(value) is not int or not 0 < value < 2**31:
        raise ArtifactError(file, f"{name} is {value!r}, not a whole number from 1")
    return value
