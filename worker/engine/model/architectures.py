"""Refuses every architecture that is not known to run right over the paged KV cache: see artifacts/families.py.

A transformers model whose window, chunk or state lives in its attention mask or in its own cache would answer, and
answer wrongly: the mask is never built here (see paged.py). So the list is of what was compared with transformers'
own generate; tests/worker/engine/model/test_architectures.py does it again for every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artifacts.encoders import ROPE_TYPES
from artifacts.families import FAMILIES
from worker.engine_api import ModelUnusableError

SUPPORTED = frozenset(family.architecture for family in FAMILIES.values())

_OWN_ATTENTION = "it has its own attention code, which transformers cannot replace"
_STATE = "it keeps a recurrent state, which this engine does not support"
_MASK = "its window or chunks are in the attention mask alone, which this engine does not build"
_SHAPES = "its layers share keys and values, or differ in their size"
# Why each was refused that was tried; others were not tried.
WHY_REFUSED = {
    "BloomForCausalLM": _OWN_ATTENTION,
    "CodeGenForCausalLM": _OWN_ATTENTION,
    "DiffLlamaForCausalLM": "it attends twice in a layer",
    "FalconForCausalLM": _OWN_ATTENTION,
    "FalconH1ForCausalLM": _STATE,
    "FalconMambaForCausalLM": _STATE,
    "GPTJForCausalLM": _OWN_ATTENTION,
    "GPTNeoForCausalLM": _OWN_ATTENTION,
    "GPTNeoXJapaneseForCausalLM": _OWN_ATTENTION,
    "Gemma3nForCausalLM": _SHAPES,
    "Gemma4ForCausalLM": _SHAPES,
    "GraniteMoeHybridForCausalLM": _STATE,
    "JambaForCausalLM": _STATE,
    "Lfm2ForCausalLM": _STATE,
    "Llama4ForCausalLM": _MASK,
    "Mamba2ForCausalLM": _STATE,
    "MambaForCausalLM": _STATE,
    "MiniMaxForCausalLM": _STATE,
    "MptForCausalLM": _OWN_ATTENTION,
    "PhimoeForCausalLM": _MASK,
    "Qwen3NextForCausalLM": _STATE,
    "XGLMForCausalLM": _OWN_ATTENTION,
}

# Fields that, where they are set, change what a token may see: (architecture or all of them, field, why).
_FIELDS_REFUSED = (
    (None, "use_bidirectional_attention", "it attends in both directions"),
    ("Qwen2MoeForCausalLM", "use_sliding_window", _MASK),
)


def check_architecture(config: Mapping[str, Any]) -> None:
    """Check the content of a config.json. Raises ModelUnusableError naming what is not supported."""
    architectures = config.get("architectures") or []
    name = str(architectures[0]) if architectures else f"model_type {config.get('model_type')!r}"
    if name not in SUPPORTED:
        why = WHY_REFUSED.get(name)
        supported = ", ".join(sorted(SUPPORTED))
        raise ModelUnusableError(
            f"architecture {name} is not supported{f': {why}' if why else ''}; supported are {supported}"
        )
    for architecture, field, why in _FIELDS_REFUSED:
        if architecture in (None, name) and config.get(field):
            raise ModelUnusableError(f"{field} of this {name} is not supported: {why}")
    for rope_type in _rope_types(config):
        if rope_type not in ROPE_TYPES:
            served = ", ".join(sorted(ROPE_TYPES))
            raise ModelUnusableError(f"rope type {rope_type!r} of this {name} is not supported; supported are {served}")


def _rope_types(config: Mapping[str, Any]) -> list[str]:
    # rope_scaling is the older name; either may hold one set of parameters or one for each kind of layer.
    types = []
    for field in ("rope_parameters", "rope_scaling"):
        parameters = config.get(field) or {}
        nested = [value for value in parameters.values() if isinstance(value, Mapping)]
        types += [str(rope.get("rope_type", rope.get("type", "default"))) for rope in nested or [parameters]]
    return types
