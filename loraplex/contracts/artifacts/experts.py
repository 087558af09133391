"""The experts of a mixture of experts, which transformers keeps as two tensors a layer, and adapters of these tensors.

    checkpoint   ...mlp.experts.7.gate_proj.weight, up_proj, down_proj        each expert's, or joined as in the model
    model        ...mlp.experts.gate_up_proj [experts, out, in], down_proj    of gpt-oss [experts, in, out]
    adapter      ...mlp.experts.base_layer.lora_A.weight [rank * experts, in], lora_B.weight [out, rank * experts]
                 ...mlp.experts.lora_A.weight, lora_B.weight

peft makes such an adapter of `target_parameters`, and wraps the module once for each of its tensors that these name, in
the tensors' order (peft `tuners/lora/layer.py:ParamWrapper`). So a tensor of the adapter does not say by its name what
it belongs to: without `base_layer` it is the last one's.

Before 0.19 peft took [experts, out, in] for [experts, in, out]: it made A for the outputs and B for the inputs. Their
sizes tell, unless inputs and outputs are equally many; then `peft_version` does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from loraplex.contracts.artifacts import ArtifactError, MismatchError
from loraplex.contracts.artifacts.base_modules import is_left_out
from loraplex.contracts.artifacts.checkpoint import Checkpoint
from loraplex.contracts.artifacts.families import FAMILIES, config_count
from loraplex.contracts.artifacts.peft_config import PeftConfig
from loraplex.contracts.artifacts.revision import TENSOR_PREFIX, WEIGHTS_FILE, LoraShape

_UP, _DOWN = "gate_up_proj", "down_proj"
# The last tensor first: it is the outermost that peft wraps.
_OUTERMOST_FIRST = (_DOWN, _UP)
_ONE_EXPERTS = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_KINDS = {"gate_proj": _UP, "up_proj": _UP, "w1": _UP, "w3": _UP, "down_proj": _DOWN, "w2": _DOWN}
# Ends of the names that Granite's checkpoints give the joined tensors, and those that they have in the model.
_JOINED = {".input_linear.weight": f".experts.{_UP}", ".output_linear.weight": f".experts.{_DOWN}"}
_ADAPTERS = re.compile(rf"{re.escape(TENSOR_PREFIX)}(.+?)((?:\.base_layer)*)(\.lora_[AB]\.weight)")
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.\d{1,6})?(?:\.post\d{1,6})?")
_V = TypeVar("_V")


class ExpertSizes(NamedTuple):
    """The sizes of a tensor of experts, each of which takes in_features and gives out_features."""

    in_features: int
    out_features: int
    experts: int


def expert_sizes(config: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, ExpertSizes]:
    """Return the tensors of a decoder's experts by the names that they have once transformers has loaded them.

    `config` is that of a served family.
    """
    family, layers = FAMILIES[config["model_type"]], config_count(config, "num_hidden_layers")
    if not family.experts:
        return {}
    shapes = {name: info.shape for name, (_, info) in checkpoint.tensors.items() if not is_left_out(name, layers)}
    # Of each tensor the outputs of its parts, such as gate and up; of each container its experts.
    joined, parts, experts = dict[str, ExpertSizes](), dict[str, dict[str, tuple[int, ...]]](), dict[str, set[str]]()
    for name, shape in shapes.items():
        one = _ONE_EXPERTS.fullmatch(name)
        if one is not None and one[3] in _KINDS and len(shape) == 2:
            # The name of Mixtral's checkpoints.
            container = one[1].replace(".block_sparse_moe.", ".mlp.")
            parts.setdefault(f"{container}.{_KINDS[one[3]]}", {})[one[3]] = shape
            experts.setdefault(container, set()).add(one[2])
        elif len(shape) == 3:
            end = next((end for end in _JOINED if name.endswith(end)), None)
            whole = name if end is None else name.removesuffix(end) + _JOINED[end]
            if whole.endswith(tuple(_JOINED.values())):
                count, first, second = shape
                sizes = (first, second) if family.experts_input_first else (second, first)
                joined[whole] = ExpertSizes(*sizes, count)
    for name, of_parts in parts.items():
        (_, in_features), *_ = of_parts.values()
        outputs = sum(shape[0] for shape in of_parts.values())
        joined[name] = ExpertSizes(in_features, outputs, len(experts[name.rpartition(".")[0]]))
    has_prefix = any(name.startswith(f"{family.prefix}.") for name in shapes)
    return {name if has_prefix else f"{family.prefix}.{name}": sizes for name, sizes in joined.items()}


def in_layout_of_model(
    shapes: Mapping[str, LoraShape], experts: Mapping[str, ExpertSizes], config: PeftConfig, architecture: str
) -> tuple[dict[str, LoraShape], frozenset[str]]:
    """Return the shapes with pairs of experts as a peft of today makes them, and the names of those it made otherwise.

    `architecture` is the model's `model_type`. Raises MismatchError where neither sizes nor version tell.
    """
    family = FAMILIES.get(architecture)
    if family is None or family.experts_input_first:
        return dict(shapes), frozenset()
    former = frozenset(name for name in shapes if name in experts and _is_former(shapes[name], experts[name], config))
    swapped = {
        name: LoraShape(shapes[name].rank, shapes[name].out_features, shapes[name].in_features) for name in former
    }
    return {**shapes, **swapped}, former


def _is_former(shape: LoraShape, sizes: ExpertSizes, config: PeftConfig) -> bool:
    if sizes.in_features != sizes.out_features:
        return shape[1:] == (sizes.out_features, sizes.in_features)
    version = _VERSION.fullmatch(config.peft_version)
    if version is None:
        raise MismatchError(
            "peft_version",
            f"{config.peft_version!r:.40} does not tell the layout of experts' tensors, which changed with 0.19; "
            "save the adapter with a release of peft",
        )
    return (int(version[1]), int(version[2])) < (0, 19)


def named_by_parameter(tensors: Mapping[str, _V], targets: Sequence[str], experts: Collection[str]) -> dict[str, _V]:
    """Rename an adapter's tensors of experts by the base's tensors that they belong to, as if these were layers.

    `...experts.base_layer.lora_A.weight` becomes `...experts.gate_up_proj.lora_A.weight`. `targets` are those of
    target_parameters, `experts` the names of the base's tensors of experts. Raises MismatchError for a target that is
    none of these, ArtifactError where a tensor is missing or belongs to none.
    """
    ends: dict[str, set[str]] = {}
    for name in experts:
        parts = name.split(".")
        for at in range(len(parts)):
            ends.setdefault(".".join(parts[at:]), set()).add(name)
    if unmatched := set(targets) - set(ends):
        raise MismatchError(
            "target_parameters",
            f"{min(unmatched)!r:.100} is not a tensor of the base model's experts, such as mlp.experts.down_proj; "
            "train layers by target_modules, and no routers or biases",
        )
    chosen = {name for target in set(targets) for name in ends[target]}
    named = {
        container: [name for kind in _OUTERMOST_FIRST if (name := f"{container}.{kind}") in chosen]
        for container in {name.rpartition(".")[0] for name in experts}
    }
    renamed, missing = dict[str, _V](), set(chosen)
    for tensor, value in tensors.items():
        match = _ADAPTERS.fullmatch(tensor)
        if match is None or not (match[1] in named or match[1] in experts):
            renamed[tensor] = value
            continue
        # Renamed tensors get names that no other tensor has, or one would overwrite the other.
        parameters, depth = named.get(match[1], []), match[2].count(".")
        if depth >= len(parameters):
            raise ArtifactError(WEIGHTS_FILE, f"tensor {tensor} belongs to none of the experts in target_parameters")
        missing.discard(parameters[depth])
        renamed[f"{TENSOR_PREFIX}{parameters[depth]}{match[3]}"] = value
    if missing:
        raise ArtifactError(WEIGHTS_FILE, f"has no tensors of {min(missing)}, which target_parameters names")
    return renamed
