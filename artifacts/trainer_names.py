"""Names of an adapter's tensors as trainers leave them, made peft's own.

_orig_mod.base_model.model.model.layers.0.q_proj.lora_A.weight    of torch.compile, and of other wrappers
base_model.model.model.layers.0.q_proj.lora_A.default.weight      with the adapter's name: a module's own state
model.layers.0.q_proj.lora_A.weight                               without base_model.model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from artifacts import ArtifactError
from artifacts.revision import TENSOR_PREFIX, WEIGHTS_FILE

_V = TypeVar("_V")
# Modules that wrap a model: torch.compile's, that of DDP and DeepSpeed, FSDP's, activation checkpointing's.
_WRAPPER = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Dictionaries of a peft layer by the names of adapters. In a file of peft's `.weight` follows at once, or nothing.
_BY_ADAPTER = re.compile(
    r"(?P<kept>\.(?:lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|trainable_tokens_delta)|\.modules_to_save)"
    r"\.(?!(?:weight|bias)$)(?P<adapter>[^.]+)(?=\.|$)"
)
_SAVED, _MAGNITUDE = ".modules_to_save", ".lora_magnitude_vector"
# What peft's layers keep of a module that was trained in full: the base's.
_ORIGINAL = ".original_module."


def as_peft_names(tensors: Mapping[str, _V]) -> tuple[dict[str, _V], tuple[str, ...]]:
    """Return the tensors by the names that peft's save_pretrained gives them, and what was changed in these.

    The latter are parts that were left out, such as `_orig_mod.`, and `base_model.model.` if it was missing. Raises
    ArtifactError for a file of several adapters.
    """
    renamed, owners, changes = dict[str, _V](), dict[str, str](), dict[str, None]()
    for name, value in tensors.items():
        if _ORIGINAL in name:
            continue
        plain = _WRAPPER.sub("", name)
        changes.update(dict.fromkeys(_WRAPPER.findall(name)))
        adapter = ""
        if match := _BY_ADAPTER.search(plain):
            adapter, kept = match["adapter"], match["kept"]
            plain = plain[: match.start()] + kept.removesuffix(_SAVED) + plain[match.end() :]
            plain = plain.removesuffix(".weight") if kept == _MAGNITUDE else plain
            changes[f"{adapter}."] = None
        if plain in renamed:
            raise ArtifactError(
                WEIGHTS_FILE,
                f"has {plain} of {owners[plain] or 'one adapter'} and of {adapter or 'another'}; save one adapter: "
                "model.save_pretrained(DIR, selected_adapters=[NAME])",
            )
        renamed[plain], owners[plain] = value, adapter
    if renamed and not any(name.startswith("base_model.") for name in renamed):
        changes[TENSOR_PREFIX] = None
        renamed = {TENSOR_PREFIX + name: value for name, value in renamed.items()}
    return renamed, tuple(changes)
