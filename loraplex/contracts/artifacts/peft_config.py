"""Read peft's adapter_config.json: fields that are served, fields without effect here, and fields that are refused.

A field that is not known to be harmless is refused by its name, so that no adapter is served wrongly.

rank_pattern and alpha_pattern are values by patterns of module names. A pattern is a regular expression that matches a
whole name, or its end after a dot; the first match counts (peft `utils/other.py:get_pattern_key`). Tenants write the
expressions, and Python's engine backtracks: the store evaluates them once, in a child process that may be killed, and
keeps names in their place. All others look names up.

The field `loraplex_chat` has the chat settings of an adapter; a base model has it in tokenizer_config.json:

    {"template": "{% for message in messages %}...", "system_prompt": "You are brief.", "tool_calls": "hermes"}
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from loraplex.contracts.artifacts import ArtifactError, MismatchError, parse_object
from loraplex.contracts.artifacts.activation import INVOCATION_FIELD, parse_invocation
from loraplex.contracts.artifacts.added_tokens import (
    ADDED_FIELD,
    ENDS_FIELD,
    AddedToken,
    parse_added_tokens,
    parse_end_tokens,
)
from loraplex.contracts.artifacts.families import HEAD, is_inner
from loraplex.contracts.artifacts.fitness import PROMPTS_FIELD, parse_prompts

if TYPE_CHECKING:
    from loraplex.contracts.artifacts.chat_formats import CallFormat, ReasoningFormat

# Maximum number of patterns, of those among them that are more than a name, and of a pattern's characters.
_MAX_PATTERNS = 4096
_MAX_EXPRESSIONS = 256
_MAX_LENGTH = 256
_NAME = re.compile(r"\^?(?:[A-Za-z0-9_-]|\\?\.)+\$?")
_ALLOWED = re.compile(r"(?:[A-Za-z0-9_.^$()|*+?\[\]-]|\\[.dw_-])+")
# Quantified groups and lookarounds: backtracking may take exponential time, and names do not need them.
_REFUSED = re.compile(r"\)[*+?]|\(\?")
CHAT_FIELD = "loraplex_chat"
# Maximum bytes of each setting.
_SETTING_BYTES = 256 * 1024
CONFIG_FILE = "adapter_config.json"
# Maximum tokens of an answer whose request sets none. The SDK puts it there from a generation_config.json beside it.
MAX_TOKENS_FIELD = "loraplex_max_tokens"
# Tokens whose embeddings an adapter has trained: ids of the input embeddings, or ids by the name of embeddings or head.
TOKENS_FIELD = "trainable_token_indices"
# Modules that were trained in full: a classification head, embeddings or the output head.
SAVED_FIELD = "modules_to_save"
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
    "target_parameters",
}
_CHECKED = {
    "peft_type",
    "task_type",
    "bias",
    "init_lora_weights",
    SAVED_FIELD,
    LABELS_FIELD,
    "peft_version",
    CHAT_FIELD,
    ADDED_FIELD,
    ENDS_FIELD,
    MAX_TOKENS_FIELD,
    PROMPTS_FIELD,
    TOKENS_FIELD,
    INVOCATION_FIELD,
}
_TASKS = ("CAUSAL_LM", "SEQ_CLS", "FEATURE_EXTRACTION")
# Modules of classification heads; their tensors are checked against the base's family (encoders.py).
HEADS = ("classifier", "score", "pooler", "head")
# Fields of training and bookkeeping. The checkpoint's tensors say which modules are adapted; fan_in_fan_out tells how
# the base stores its weight; each *_config belongs to an init that is refused or leaves the base model as it is.
_WITHOUT_EFFECT = {
    "auto_mapping", "corda_config", "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "qalora_group_size",
    "revision", "runtime_config", "target_modules",
}  # fmt: skip
# Fields that other trainers write beside peft's, which say how they trained: unsloth's and ms-swift's.
_OF_TRAINERS = {"lora_dtype", "lorap_emb_lr", "lorap_lr_ratio", "unsloth_fixed", "unsloth_version"}
# Fields that may differ from their default; docs/reference/adapter-files.md lists them, and the refused ones.
ACCEPTED = frozenset(_SERVED | _CHECKED | _WITHOUT_EFFECT | _OF_TRAINERS)
_PLAIN_INITS = {True, False, None, "gaussian", "orthogonal", "eva", "mica"}
_REWRITING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Methods of peft that add to the base's weights, of which it makes LoRA by itself since 0.19.
_CONVERTED_BY_PEFT = {
    "C3A", "DELORA", "FOURIERFT", "GRALORA", "HIRA", "LOHA", "LOKR", "MISS", "PSOFT", "RANDLORA", "SHIRA", "TINYLORA",
    "UNILORA", "VBLORA", "VERA", "WAVEFT",
}  # fmt: skip
_INVOCATION_IN_WORDS = f"was replaced in peft: put its token ids, of the base's tokenizer, into {INVOCATION_FIELD}"
# Reasons why fields are refused, and what to do instead.
WHY_REFUSED = {
    "alora_invocation_string": _INVOCATION_IN_WORDS,
    "invocation_string": _INVOCATION_IN_WORDS,
    "arrow_config": "Arrow routes between adapters; push each as an adapter of its own",
    "ensure_weight_tying": "it ties an adapter's own embeddings and head to one weight; train without it",
    "kasa_config": "KaSA changes how an adapter is applied; train plain LoRA",
    "layer_replication": "replicated layers are not served; train on the base model as it is",
    "lora_bias": "biases of LoRA layers are not served; train with lora_bias=False",
    "megatron_config": "Megatron's parallel layers are not served; train on transformers' own",
    "monteclora_config": "MonteCLoRA samples its weights; train plain LoRA",
    "use_bdlora": "block-diagonal LoRA is not served; train plain LoRA",
    "use_qalora": "QALoRA pools its inputs; train plain LoRA",
    "velora_config": "VeLoRA is not known to leave a plain LoRA adapter; train without it",
}


@dataclass(frozen=True, slots=True)
class NamePatterns:
    """Patterns and their values, in the order of the file. `field` is the one that they stand in."""

    field: str
    entries: tuple[tuple[str, float], ...]
    # Place and value of each pattern, by the name that it is, without escapes; one of a whole name begins with ^.
    # None: a pattern is more than a name.
    _names: dict[str, tuple[int, float]] | None = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names: dict[str, tuple[int, float]] = {}
        for place, (pattern, value) in enumerate(self.entries):
            names.setdefault(pattern.replace("\\", "").removesuffix("$"), (place, value))
        plain = all(_NAME.fullmatch(pattern) for pattern, _ in self.entries)
        object.__setattr__(self, "_names", names if plain else None)

    @property
    def has_expressions(self) -> bool:
        """Tell whether a pattern is more than a name: `resolved` makes names of it."""
        return self._names is None

    def value_of(self, module: str, default: float) -> float:
        """Return the value of the first pattern that names the module. Raises MismatchError beside expressions."""
        if self._names is None:
            raise MismatchError(self.field, "has regular expressions; push the adapter again")
        tails = [module]
        while dot := tails[-1].find(".") + 1:
            tails.append(tails[-1][dot:])
        matches = [self._names[name] for name in (f"^{module}", *tails) if name in self._names]
        return min(matches)[1] if matches else default

    def resolved(self, modules: Collection[str], default: float) -> NamePatterns:
        """Return patterns that are names and mean the same for these modules. Raises ArtifactError.

        This evaluates what a tenant wrote, which may take minutes: call it where the process may be killed.
        """
        compiled = [(_compile(self.field, pattern), value) for pattern, value in self.entries]
        values = {
            module: next((value for pattern, value in compiled if pattern.match(module)), default) for module in modules
        }
        # Of a name and the end of another the longer one comes first.
        ordered = sorted(values.items(), key=lambda item: (-len(item[0]), item[0]))
        names = NamePatterns(self.field, tuple(item for item in ordered if item[1] != default))
        if any(names.value_of(module, default) != value for module, value in values.items()):
            return NamePatterns(self.field, tuple(ordered))
        return names

    @property
    def anchored(self) -> bool:
        """Tell whether a pattern matches at the begin of a name alone."""
        return any("^" in pattern for pattern, _ in self.entries)

    @property
    def values(self) -> tuple[float, ...]:
        """Return all values, in the order of the file."""
        return tuple(value for _, value in self.entries)


def parse_name_patterns(field: str, patterns: Mapping[str, Any]) -> NamePatterns:
    """Read patterns whose values the caller has checked. Raises MismatchError."""
    if len(patterns) > _MAX_PATTERNS:
        raise MismatchError(field, f"has {len(patterns)} patterns; at most {_MAX_PATTERNS} are served")
    if sum(not _NAME.fullmatch(pattern) for pattern in patterns) > _MAX_EXPRESSIONS:
        raise MismatchError(field, f"has more than {_MAX_EXPRESSIONS} regular expressions; name the modules instead")
    for pattern in patterns:
        costly = len(re.findall(r"[*+?(]", pattern)) > 2
        if len(pattern) > _MAX_LENGTH or costly or not _ALLOWED.fullmatch(pattern) or _REFUSED.search(pattern):
            raise MismatchError(
                field,
                f"the pattern {_shown(pattern)!r} is too complex; "
                "use module names, with two of '*', '+', '?', '(a|b)' at most",
            )
    return NamePatterns(field, tuple((_text_name(name), number) for name, number in patterns.items()))


def _text_name(name: str) -> str:  # as revision._WRAPPER
    return re.sub(r"\b(language|text)_model\\?\.", "", name)


def _compile(field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError) as error:
        raise ArtifactError(field, f"{_shown(pattern)!r} is not a regular expression: {error}") from error


def _shown(pattern: str) -> str:
    return pattern if len(pattern) <= 80 else pattern[:80] + "..."


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Jinja templates, the second for chats with tools, a system prompt for chats without one, and formats of answers.

    An empty one is not set. The format of calls is the name of a known one, or itself.
    """

    template: str = ""
    tool_template: str = ""
    system_prompt: str = ""
    tool_calls: str | CallFormat = ""
    reasoning: ReasoningFormat | None = None


def parse_chat_settings(value: Any) -> ChatSettings:
    """Parse the field's value. Raises ArtifactError, MismatchError on a key or a format that is not served."""
    if value is None:
        return ChatSettings()
    if not isinstance(value, dict):
        raise ArtifactError(CHAT_FIELD, "is not a JSON object")
    # Read with msgspec, without which an engine by itself starts.
    from loraplex.contracts.artifacts.chat_formats import CALLS, NO_CALLS, CallFormat, ReasoningFormat, parse_format

    names = [field.name for field in fields(ChatSettings)]
    own = dict(value)
    for key, text in value.items():
        field = f"{CHAT_FIELD}.{key}"[:200]
        if key not in names:
            raise MismatchError(field, f"is not one of {', '.join(names)}")
        is_format = key == "reasoning" or (key == "tool_calls" and isinstance(text, dict))
        if not (is_format or isinstance(text, str)):
            raise ArtifactError(field, "is not a text")
        try:
            size = len((json.dumps(text, ensure_ascii=False) if is_format else text).encode())
        except UnicodeEncodeError:
            raise ArtifactError(field, "has half of a surrogate pair, which is not a character") from None
        if size > _SETTING_BYTES:
            raise ArtifactError(field, f"is larger than {_SETTING_BYTES} bytes")
        if is_format:
            own[key] = parse_format(field, text, ReasoningFormat if key == "reasoning" else CallFormat)
    if isinstance(name := own.get("tool_calls", NO_CALLS), str) and name not in (*CALLS, NO_CALLS):
        raise MismatchError(f"{CHAT_FIELD}.tool_calls", f"{name!r} is not one of {', '.join((*CALLS, NO_CALLS))}")
    return ChatSettings(**own)


def parse_max_tokens(value: Any) -> int:
    """Return the field's value, 0 for none. Raises ArtifactError."""
    if value is None:
        return 0
    if type(value) is not int or not 0 < value < 1 << 32:
        raise ArtifactError(MAX_TOKENS_FIELD, f"{_shown(str(value))} is not a whole number from 1 on, of 32 bits")
    return value


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
    # Names of tensors of experts, or their ends after a dot.
    target_parameters: tuple[str, ...] = ()
    peft_version: str = ""
    # Ids of trained tokens by the name that a module ends with; an empty name means the input embeddings.
    trained_tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()
    # The names, or their ends after a dot, of embeddings and output head that were trained in full.
    trained_ends: tuple[str, ...] = ()
    added_tokens: tuple[AddedToken, ...] = ()
    end_tokens: tuple[str | int, ...] = ()
    # The token ids of an activated adapter's invocation.
    invocation: tuple[int, ...] = ()

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


def lora_fields(ranks: Mapping[str, int], alphas: Mapping[str, float], *, use_dora: bool = False) -> dict[str, Any]:
    """Return the content of an adapter_config.json for LoRA of linear layers, by their modules' names; at least one."""
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {module: own for module, own in ranks.items() if own != rank},
        "alpha_pattern": {module: own for module, own in alphas.items() if own != alpha},
        "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
        "use_dora": use_dora,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def parse_peft_config(data: bytes) -> PeftConfig:
    """Parse the file. Raises ArtifactError for a broken file, MismatchError for a field that is not served."""
    config = parse_object(data, CONFIG_FILE)
    _check_kind(config)
    _check_init(config.get("init_lora_weights"))
    parse_chat_settings(config.get(CHAT_FIELD))
    parse_prompts(config.get(PROMPTS_FIELD))
    parse_max_tokens(config.get(MAX_TOKENS_FIELD))
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
        target_parameters=_target_parameters(config),
        peft_version=str(config.get("peft_version") or ""),
        trained_tokens=_trained_tokens(config.get(TOKENS_FIELD) or {}),
        trained_ends=_trained_ends(config.get(SAVED_FIELD) or []),
        added_tokens=parse_added_tokens(config.get(ADDED_FIELD)),
        end_tokens=parse_end_tokens(config.get(ENDS_FIELD)),
        invocation=parse_invocation(config),
    )


def _check_kind(config: dict[str, Any]) -> None:
    kind, task, bias = config.get("peft_type"), config.get("task_type"), config.get("bias", "none")
    if kind != "LORA":
        close = "peft's save_as_lora(DIR, model, rank=64) makes a LoRA that is close to it"
        advice = close if kind in _CONVERTED_BY_PEFT else "train plain LoRA"
        raise MismatchError("peft_type", f"{kind!r} is not served, only 'LORA'; {advice}")
    if task is not None and task not in _TASKS:
        raise MismatchError("task_type", f"{task!r} is not served, only {', '.join(map(repr, _TASKS))}")
    if bias != "none":
        raise MismatchError("bias", f"{bias!r} is not served, only 'none'")


def _trained_ends(modules: Any) -> tuple[str, ...]:
    """Return those of the modules that are no parts of a classification head."""
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise ArtifactError(SAVED_FIELD, "is not a list of module names")
    ends = tuple(_text_name(name) for name in modules if name not in HEADS)
    for name in ends:
        if is_inner(name):
            message = f"a fully trained {name[:80]} is not supported, only embeddings, {HEAD}, and classification heads"
            raise MismatchError(SAVED_FIELD, f"{message} ({', '.join(HEADS)})")
    return ends


def _labels(names: Any) -> tuple[str, ...]:
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ArtifactError(LABELS_FIELD, "is not an object of numbers and names")
    if set(names) != {str(index) for index in range(len(names))}:
        raise ArtifactError(LABELS_FIELD, f"has not the numbers 0 to {len(names) - 1}")
    if sum(map(len, names.values())) > _LABEL_BYTES:
        raise ArtifactError(LABELS_FIELD, f"is longer than {_LABEL_BYTES} characters")
    return tuple(names[str(index)] for index in range(len(names)))


def _target_parameters(config: dict[str, Any]) -> tuple[str, ...]:
    names = config.get("target_parameters") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ArtifactError("target_parameters", "is not a list of names of parameters")
    if len(names) > _MAX_PATTERNS:
        raise MismatchError("target_parameters", f"has {len(names)} names; at most {_MAX_PATTERNS} are served")
    if names and config.get("use_dora"):
        raise MismatchError("target_parameters", "DoRA of experts is not served; train with use_dora=False")
    return tuple(map(_text_name, names))


def _trained_tokens(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    named = value if isinstance(value, dict) else {"": value}
    for name, ids in named.items():
        field = f"{TOKENS_FIELD}.{name[:80]}" if name else TOKENS_FIELD
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise ArtifactError(field, "is not a list of token ids")
        if not 0 < len(ids) <= MAX_RANK or len(set(ids)) != len(ids):
            raise MismatchError(field, f"has {len(ids)} ids; 1 to {MAX_RANK} different ones are served")
    return tuple((_text_name(name), tuple(ids)) for name, ids in named.items())


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
