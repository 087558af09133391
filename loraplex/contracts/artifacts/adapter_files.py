"""Reads an adapter's directory in peft's layout and checks it against its base: the store and the workers both do.

Nothing here needs torch or a weight. The store adds what it keeps of a configuration, and whether all numbers are
finite; a worker adds its own ranks, and what it computes with the base's weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from loraplex.contracts.artifacts import ArtifactError, MismatchError
from loraplex.contracts.artifacts.activation import INVOCATION_FIELD
from loraplex.contracts.artifacts.checkpoint import ADAPTER_HEADER_BYTES, TensorInfo, read_header, read_small_file
from loraplex.contracts.artifacts.encoders import canonical_header, check_head, head_tensors, hidden_size
from loraplex.contracts.artifacts.experts import ExpertSizes, in_layout_of_model, named_by_parameter
from loraplex.contracts.artifacts.families import is_embedding
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE, MAX_RANK, TOKENS_FIELD, PeftConfig, parse_peft_config
from loraplex.contracts.artifacts.revision import (
    ENDS_ON_CPU,
    WEIGHTS_FILE,
    LoraShape,
    TrainedTokens,
    check_copies,
    lora_tensors,
    ranks_of,
    trained_ends,
    trained_tokens,
)

# Types of an adapter's numbers that are served.
_DTYPES = ("F32", "F16", "BF16")
# Names of a wrapped text model's neighbours: towers, and what projects their outputs.
_OF_TOWER = re.compile(r"\.(\w*(vision|visual|image|video|audio)\w*|\w*projector|connector|aligner)\.")


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's configuration and tensors, without their numbers; the latter have the names of `canonical_header`.

    `sent` is the configuration in the file, `config` has names for its patterns. `changes` are those of as_peft_names.
    `former` are the experts whose pair an old peft saved the other way round. By parameter or module: the tensors of
    its own `head`, of `ends` that were trained in full, and of `tokens`; `copies` are those of check_copies. `ranks`
    are those of ranks_of.
    """

    sent: PeftConfig
    config: PeftConfig
    header: Mapping[str, TensorInfo]
    changes: tuple[str, ...]
    shapes: Mapping[str, LoraShape]
    former: frozenset[str]
    head: Mapping[str, str]
    ends: Mapping[str, str]
    copies: Mapping[str, str]
    tokens: Mapping[str, TrainedTokens]
    ranks: Mapping[str, int]


def read_adapter_files(
    directory: Path,
    modules: Mapping[str, tuple[int, ...]],
    architecture: str,
    *,
    ends: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    evaluate: bool = False,
) -> AdapterFiles:
    """Read and check an adapter of a base whose `model_type` is `architecture`.

    `modules` are those that it may change, (in_features, out_features) or ExpertSizes by name; `ends` the embeddings
    and the head of the base, which it may not change on every device. With `evaluate` patterns become names, which may
    take minutes: call it where the process may be killed. Raises ArtifactError for broken files, MismatchError for what
    does not fit the base or is not served.
    """
    sent = parse_peft_config(read_small_file(directory / CONFIG_FILE))
    header, changes = canonical_header(read_header(directory / WEIGHTS_FILE, ADAPTER_HEADER_BYTES), sent, architecture)
    if other := next(filter(_OF_TOWER.search, header), ""):
        message = (
            "changes a tower for images or sound, or its projector, and the base is the text model alone; train with"
        )
        raise MismatchError(WEIGHTS_FILE, f"tensor {other} {message} exclude_modules=r'.*(vision|visual|projector).*'")
    experts = {name: sizes for name, sizes in modules.items() if isinstance(sizes, ExpertSizes)}
    header = named_by_parameter(header, sent.target_parameters, experts)
    for name, tensor in header.items():
        if tensor.dtype not in _DTYPES:
            raise MismatchError(WEIGHTS_FILE, f"tensor {name} is {tensor.dtype}; F32, F16 and BF16 are served")
    head, own_ends = head_tensors(header, architecture), trained_ends(header, sent, modules)
    own = [*head.values(), *own_ends.values()]
    counts = {name: sizes.experts for name, sizes in experts.items()}
    shapes = lora_tensors(header, use_dora=sent.use_dora, own=own, experts=counts)
    shapes, former = in_layout_of_model(shapes, experts, sent, architecture)
    whole = {**modules, **ends}
    copies = check_copies(header, whole, own)
    check_head(header, sent, architecture, whole, hidden_size(whole))
    config = sent.resolved(shapes) if evaluate else sent
    for name, shape in shapes.items():
        if sent.invocation and (name in experts or is_embedding(name)):
            raise MismatchError(INVOCATION_FIELD, f"is not served for {name}; train without adapting that")
        _check_module(name, shape, modules, config, ENDS_ON_CPU if name in ends else "")
    tokens = trained_tokens(header, sent, modules)
    ranks = ranks_of(shapes, tokens)
    for name, rank in ranks.items():
        if rank > MAX_RANK:
            alone = name in shapes and shapes[name].rank == rank
            field, words = ("r", "") if alone else (TOKENS_FIELD, " with its trained tokens")
            raise MismatchError(field, f"{name}{words} has rank {rank}; at most {MAX_RANK} is served")
    return AdapterFiles(sent, config, header, changes, shapes, former, head, own_ends, copies, tokens, ranks)


def _check_module(
    name: str, shape: LoraShape, modules: Mapping[str, tuple[int, ...]], config: PeftConfig, elsewhere: str
) -> None:
    """Check a pair against the base's module; `elsewhere` says where a module is served that is not served here."""
    if name not in modules:
        here = f" on this device; {elsewhere}" if elsewhere else ""
        raise MismatchError(WEIGHTS_FILE, f"{name} is not a layer of the base that an adapter may change{here}")
    _, *sizes = shape
    if sizes != (own := [*modules[name][:2]]):
        message = f"{name} is for {sizes[0]} inputs and {sizes[1]} outputs; the base has {own[0]} and {own[1]}"
        raise MismatchError(WEIGHTS_FILE, message)
    if shape.rank != (rank := config.rank_of(name)):
        raise ArtifactError(WEIGHTS_FILE, f"{name} has rank {shape.rank}, but {CONFIG_FILE} gives it {rank}")
