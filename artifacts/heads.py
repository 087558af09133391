"""Classification heads of adapters: the parameters that peft saves in full beside LoRA (modules_to_save)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from artifacts.encoders import Head, head_of, with_prefix, without_unused
from artifacts.errors import ArtifactError, MismatchError
from artifacts.families import is_embedding, is_head
from artifacts.peft_config import LABELS_FIELD, PeftConfig
from artifacts.revision import TENSOR_PREFIX, WEIGHTS_FILE
from artifacts.safetensors_header import TensorInfo


def canonical_header(header: Mapping[str, TensorInfo], config: PeftConfig, architecture: str) -> dict[str, TensorInfo]:
    """Return the tensors by the names that they have in the base's ...ForSequenceClassification or ...ForCausalLM.

    Those that nothing depends on are left out. Raises MismatchError.
    """
    renamed = with_prefix(header, architecture)
    if renamed.keys() != header.keys():
        config.check_anchors()
    return without_unused(renamed, architecture)


def head_tensors(header: Mapping[str, TensorInfo], architecture: str) -> dict[str, str]:
    """Return the names of the tensors of an adapter's own head, by parameter, such as classifier.weight.

    Names must be those of canonical_header.
    """
    parameters = [f"{module}.{kind}" for module in head_of(architecture).modules for kind in ("weight", "bias")]
    return {name: TENSOR_PREFIX + name for name in parameters if TENSOR_PREFIX + name in header}


def check_head(
    header: Mapping[str, TensorInfo], config: PeftConfig, architecture: str, modules: Collection[str], width: int
) -> None:
    """Check an adapter's own head, where it has one, against the names of the base's modules and its hidden width.

    Raises ArtifactError for a broken head, MismatchError for one that lacks what the base does not have.
    """
    head, saved = head_of(architecture), head_tensors(header, architecture)
    if not saved:
        if config.labels:
            raise ArtifactError(LABELS_FIELD, "names the labels of a head that the adapter does not have")
        return
    expected = {f"{head.dense}.weight": (width, width), f"{head.dense}.bias": (width,)}
    expected |= {f"{head.norm}.{kind}": (width,) for kind in ("weight", "bias")}
    labels = header[saved[f"{head.output}.weight"]].shape[0] if f"{head.output}.weight" in saved else 0
    expected |= {f"{head.output}.weight": (labels, width), f"{head.output}.bias": (labels,)}
    for parameter, name in saved.items():
        if header[name].shape != expected[parameter] or 0 in expected[parameter]:
            raise MismatchError(
                WEIGHTS_FILE, f"{name} has the shape {list(header[name].shape)}, not {list(expected[parameter])}"
            )
    _check_complete(head, saved, modules)
    if labels and config.labels and len(config.labels) != labels:
        raise ArtifactError(LABELS_FIELD, f"names {len(config.labels)} labels; the head has {labels}")


def _check_complete(head: Head, saved: Collection[str], modules: Collection[str]) -> None:
    for module in head.linears:
        if f"{module}.weight" not in saved and module not in modules:
            parts = ", ".join(repr(name.removeprefix("bert.").partition(".")[0]) for name in head.linears)
            raise MismatchError(
                "modules_to_save",
                f"{module} is neither in the adapter nor in the base; train with modules_to_save=[{parts}]",
            )
    if head.norm and head.dense not in modules and f"{head.norm}.weight" not in saved:
        raise MismatchError("modules_to_save", f"{head.norm} is neither in the adapter nor in the base")


def hidden_size(modules: Mapping[str, tuple[int, int]]) -> int:
    """Return the width of the hidden states that a head gets; `modules` are (in_features, out_features) by name."""
    for name, (in_features, _) in modules.items():
        if is_head(name):
            return in_features
    projections = [out for name, (_, out) in modules.items() if name.endswith(".embed_proj")]
    return (projections or [out for name, (_, out) in modules.items() if is_embedding(name)] or [0])[0]
