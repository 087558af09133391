"""Read peft's adapter_config.json: fields that are served, fields without effect here, and fields that are refused.

A field that is not known to be harmless is refused by its name, so that no adapter is served wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from artifacts.certificate import PROMPTS_FIELD, parse_prompts
from artifacts.chat_settings import CHAT_FIELD, parse_chat_settings
from artifacts.errors import ArtifactError, MismatchError
from artifacts.json_object import parse_object
from artifacts.name_patterns import NamePatterns, parse_name_patterns

CONFIG_FILE = "adapter_config.json"
# The names of an adapter's labels, by number as in transformers' config.json.
LABELS_FIELD = "id2label"
# Maximum bytes of all names of an adapter's labels.
_LABEL_BYTES = 64 * 1024
# Maximum rank that the system serves.
MAX_RANK = 256

_SERVED = {
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "fan_in_fan_out",
    "base_model_name_or_path",
}
_CHECKED = {
    "peft_type",
    "task_type",
    "bias",
    "init_lora_weights",
    "modules_to_save",
    LABELS_FIELD,
    CHAT_FIELD,
    PROMPTS_FIELD,
}
_TASKS = ("CAUSAL_LM", "SEQ_CLS", "FEATURE_EXTRACTION")
# Modules of classification heads; their tensors are checked against the base's family (heads.py).
_HEADS = ("classifier", "score", "pooler", "head")
# Fields of training and bookkeeping. The checkpoint's tensors say which modules are adapted; fan_in_fan_out tells how
# the base stores its weight; each *_config belongs to an init that is refused or leaves the base model as it is.
_WITHOUT_EFFECT = {
    "auto_mapping", "corda_config", "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules",
}  # fmt: skip
# Fields that may differ from their default; docs/reference/adapter-fields.md lists them, and the refused ones.
ACCEPTED = frozenset(_SERVED | _CHECKED | _WITHOUT_EFFECT)
_PLAIN_INITS = {True, False, None, "gaussian", "orthogonal", "eva", "mica"}
_REWRITING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Reasons why fields are refused, and what to do instead.
WHY_REFUSED = {
    "alora_invocation_tokens": "activated LoRA is not served; train plain LoRA",
    "arrow_config": "Arrow routes between adapters; push each as an adapter of its own",
    "ensure_weight_tying": "it is for trained embeddings, which are not served; leave it out",
    "kasa_config": "KaSA changes how an adapter is applied; train plain LoRA",
    "layer_replication": "replicated layers are not served; train on the base model as it is",
    "lora_bias": "biases of LoRA layers are not served; train with lora_bias=False",
    "megatron_config": "Megatron's parallel layers are not served; train on transformers' own",
    "monteclora_config": "MonteCLoRA samples its weights; train plain LoRA",
    "target_parameters": "LoRA on bare parameters, such as those of experts, is not served; target modules",
    "trainable_token_indices": "trained token embeddings are not served; train LoRA on linear layers alone",
    "use_bdlora": "block-diagonal LoRA is not served; train plain LoRA",
    "use_qalora": "QALoRA pools its inputs; train plain LoRA",
    "velora_config": "VeLoRA is not known to leave a plain LoRA adapter; train without it",
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields that decide an adapter's output. `base_model` is the file's hint, often a path, and is not checked."""

    rank: int
    alpha: float
    rank_pattern: NamePatterns
    alpha_pattern: NamePatterns
    use_rslora: bool
    use_dora: bool
    fan_in_fan_out: bool
    base_model: str
    labels: tuple[str, ...] = ()

    def check_anchors(self) -> None:
        """Raise MismatchError for a pattern of a name's begin; for adapters of the model without its head."""
        for patterns in (self.rank_pattern, self.alpha_pattern):
            if patterns.anchored:
                raise MismatchError(
                    patterns.field, "begins a pattern with '^', and the base's names begin otherwise; leave it out"
                )

    @property
    def has_expressions(self) -> bool:
        """Tell whether a pattern is more than a name, so that `resolved` comes before `rank_of` and `scaling_of`."""
        return self.rank_pattern.has_expressions or self.alpha_pattern.has_expressions

    def resolved(self, modules: Collection[str]) -> PeftConfig:
        """Return the same for these modules, with names for patterns. May take minutes. Raises ArtifactError."""
        return replace(
            self,
            rank_pattern=self.rank_pattern.resolved(modules, self.rank),
            alpha_pattern=self.alpha_pattern.resolved(modules, self.alpha),
        )

    @property
    def max_rank(self) -> int:
        """Return the largest rank that the file names."""
        return max((self.rank, *(int(value) for value in self.rank_pattern.values)))

    def rank_of(self, module: str) -> int:
        """Return the rank that the file gives a module, such as model.layers.0.self_attn.q_proj."""
        return int(self.rank_pattern.value_of(module, self.rank))

    def scaling_of(self, module: str, rank: int) -> float:
        """Return the factor of B·A: alpha/rank, or alpha/sqrt(rank) with rsLoRA. `rank` is the module's own."""
        alpha = self.alpha_pattern.value_of(module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def parse_peft_config(data: bytes) -> PeftConfig:
    """Parse the file. Raises ArtifactError for a broken file, MismatchError for a field that is not served."""
    config = parse_object(data, CONFIG_FILE)
    _check_kind(config)
    _check_init(config.get("init_lora_weights"))
    _check_saved(config.get("modules_to_save") or [])
    parse_chat_settings(config.get(CHAT_FIELD))
    parse_prompts(config.get(PROMPTS_FIELD))
    for field in sorted(set(config) - ACCEPTED):
        if not _is_default(config[field]):
            why = WHY_REFUSED.get(field, "this version does not know the field, and it is not at its default")
            raise MismatchError(field, why)
    if "r" not in config:
        raise ArtifactError("r", f"is missing in {CONFIG_FILE}")
    return PeftConfig(
        rank=_rank("r", config["r"]),
        alpha=_number("lora_alpha", config.get("lora_alpha", 8)),
        rank_pattern=_patterns(config, "rank_pattern", _rank),
        alpha_pattern=_patterns(config, "alpha_pattern", _number),
        use_rslora=_flag(config, "use_rslora"),
        use_dora=_flag(config, "use_dora"),
        fan_in_fan_out=_flag(config, "fan_in_fan_out"),
        base_model=str(config.get("base_model_name_or_path") or ""),
        labels=_labels(config.get(LABELS_FIELD) or {}),
    )


def _check_kind(config: dict[str, Any]) -> None:
    kind, task, bias = config.get("peft_type"), config.get("task_type"), config.get("bias", "none")
    if kind != "LORA":
        raise MismatchError("peft_type", f"{kind!r} is not served, only 'LORA'")
    if task is not None and task not in _TASKS:
        raise MismatchError("task_type", f"{task!r} is not served, only {', '.join(map(repr, _TASKS))}")
    if bias != "none":
        raise MismatchError("bias", f"{bias!r} is not served, only 'none'")


def _check_saved(modules: Any) -> None:
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise ArtifactError("modules_to_save", "is not a list of module names")
    for name in modules:
        if name not in _HEADS:
            raise MismatchError(
                "modules_to_save",
                f"{name!r} trained in full is not served, only classification heads ({', '.join(_HEADS)})",
            )


def _labels(names: Any) -> tuple[str, ...]:
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ArtifactError(LABELS_FIELD, "is not an object of numbers and names")
    if set(names) != {str(index) for index in range(len(names))}:
        raise ArtifactError(LABELS_FIELD, f"has not the numbers 0 to {len(names) - 1}")
    if sum(map(len, names.values())) > _LABEL_BYTES:
        raise ArtifactError(LABELS_FIELD, f"is longer than {_LABEL_BYTES} characters")
    return tuple(names[str(index)] for index in range(len(names)))


def _check_init(init: Any) -> None:
    if isinstance(init, str) and init.startswith(_REWRITING_INITS):
        raise MismatchError(
            "init_lora_weights",
            f"{init!r} changed the base model's weights; convert it to plain LoRA with peft's "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )
    if isinstance(init, (list, dict)) or init not in _PLAIN_INITS:
        raise MismatchError("init_lora_weights", f"{init!r} is not known to leave the base model as it was")


def _is_default(value: Any) -> bool:
    return value is None or value is False or value in ({}, [], "")


def _flag(config: dict[str, Any], field: str) -> bool:
    value = config.get(field, False)
    if not isinstance(value, bool):
        raise ArtifactError(field, f"{value!r} is not true or false")
    return value


def _rank(field: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ArtifactError(field, f"{value!r} is not a rank: a whole number from 1")
    return value


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
        raise ArtifactError(field, f"{value!r} is not a number")
    return float(value)


def _patterns(config: dict[str, Any], field: str, check: Any) -> NamePatterns:
    value = config.get(field) or {}
    if not isinstance(value, dict):
        raise ArtifactError(field, "is not an object of patterns and numbers")
    for pattern, number in value.items():
        check(f"{field}[{pattern[:80]!r}]", number)
    return parse_name_patterns(field, value)
