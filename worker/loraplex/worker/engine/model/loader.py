"""Loads a transformers directory: checked first, never from the network, every weight accounted for."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.base_modules import model_bytes, read_weights
from loraplex.contracts.artifacts.checkpoint import TOWERS, TensorInfo, read_checkpoint, read_config
from loraplex.contracts.artifacts.encoders import check_rope_types
from loraplex.contracts.artifacts.families import FAMILIES, KvShape, is_inner
from loraplex.contracts.artifacts.quantization import check_device, parse_quantization, stored_scheme
from loraplex.worker.engine.attention import paged
from loraplex.worker.engine.attention.paged import AttentionContext, RandomAttention
from loraplex.worker.engine.device import available_bytes, dtype_name, return_freed_memory
from loraplex.worker.engine.linear.experts import expert_tensors, lay_out_experts
from loraplex.worker.engine.linear.layouts import (
    codes_name,
    laid_out,
    multiplies_bfloat16,
    panels_work,
    replace_linears,
)
from loraplex.worker.engine.lora.base_layers import LoadedBase
from loraplex.worker.engine.parallel.group import RankGroup, SplitModel, rank_device
from loraplex.worker.engine.parallel.splits import RankPlan
from loraplex.worker.engine.quantized.layers import AnyLinear, QuantizedEmbedding, QuantizedLinear, is_linear
from loraplex.worker.engine.quantized.stored import (
    QuantizedWeights,
    loading_options,
    open_slices,
    transformers_config,
)
from loraplex.worker.engine_api import EngineConfig, ModelUnusableError
from loraplex.worker.sizing import DTYPE_BYTES, cpu_dtype, own_dtype, slot_numbers

# Every architecture that is not known to run right over the paged KV cache is refused: a model whose window, chunk or
# state lies in its attention mask or in its own cache would answer, and answer wrongly, since the mask is never built
# here (see paged.py). tests/worker/engine/model/test_architectures.py compares those in artifacts/families.py with
# transformers' own generate.
SUPPORTED = frozenset(family.architecture for family in FAMILIES.values())

# Fields that, where they are set, change what a token may see: (architecture or all of them, field, why).
_FIELDS_REFUSED = (
    (None, "use_bidirectional_attention", "it attends in both directions"),
    (
        "Qwen2MoeForCausalLM",
        "use_sliding_window",
        "its windows are in the attention mask alone, which this engine does not build",
    ),
)


def check_architecture(config: Mapping[str, Any]) -> None:
    """Check the content of a config.json. Raises ModelUnusableError or ArtifactError naming what is not supported."""
    architectures = config.get("architectures") or []
    name = str(architectures[0]) if architectures else f"model_type {config.get('model_type')!r}"
    if name not in SUPPORTED:
        reason = f": {why}" if (why := import_module(TOWERS).WHY_REFUSED.get(name)) else ""
        served = ", ".join(sorted(SUPPORTED))
        raise ModelUnusableError(f"architecture {name} is not supported{reason}; supported are {served}")
    for architecture, field, why in _FIELDS_REFUSED:
        if architecture in (None, name) and config.get(field):
            raise ModelUnusableError(f"{field} of this {name} is not supported: {why}")
    check_rope_types(config)


@torch.inference_mode()
def probe_kv_shape(module: Any, attention: AttentionContext, device: torch.device) -> KvShape:
    """Compute one token to see which keys and values the layers make. Raises ModelUnusableError where they
    differ, or the model computes nothing.
    """
    probe = RandomAttention()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with attention.during(probe):
        try:
            module(input_ids=zero, position_ids=zero, use_cache=False, logits_to_keep=zero[0])
        except RuntimeError as error:  # sizes of its config contradict each other
            raise ModelUnusableError(f"this model can't compute a token: {' '.join(str(error).split())}") from error
    of_layers = {call.layer: (*call.key.shape[1:], call.value.shape[-1]) for call, _ in probe.calls}
    shapes = set(of_layers.values())
    if sorted(of_layers) != list(range(len(of_layers))) or len(shapes) != 1:
        raise ModelUnusableError("the layers of this model differ in the shape of their keys and values")
    return KvShape(len(of_layers), *shapes.pop())


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel(LoadedBase):
    """A decoder ready to run."""

    end_token_ids: frozenset[int]
    kv: KvShape
    attention: AttentionContext


def load_model(
    path: str,
    device: str = "cpu",
    dtype: str = "auto",
    quantize: str = "",
    group: RankGroup | None = None,
    *,
    slot_ranks: tuple[int, int] = (0, 0),
) -> LoadedModel:
    """Load the model in directory `path`; dtype "auto" is the model's own.

    `quantize` names the scheme in which float weights are loaded. With a group, this rank's part is loaded. On CUDA the
    memory is to hold an adapter slot too, of these ranks for layers and experts. Raises ModelUnusableError.
    """
    directory, place = Path(path), device_of(device)
    config = _read_config(directory)
    try:
        manifest = read_base_model(path, name="model", quantize=quantize)
        checkpoint, scheme = read_checkpoint(directory), parse_quantization(quantize)
        weights = read_weights(config, checkpoint)
        stored = stored_scheme(config)
        check_device(stored.quantization if stored else scheme, device)
    except ArtifactError as error:
        raise ModelUnusableError(f"{directory}: {error}") from None
    number = dtype_of(dtype, config, next(tensor for _, tensor in checkpoint.tensors.values()), place)
    parameters, needed = model_bytes(checkpoint, weights, scheme, number.itemsize)
    # On the CPU all ranks' parts are in one memory.
    shares = group.ranks if group is not None and place.type != "cpu" else 1
    check_memory(directory, needed // shares, place, manifest.quantization or dtype_name(number))
    if place.type == "cuda":
        inner = [one for one in manifest.modules if is_inner(one.name)]
        layers = [(one.in_features, one.out_features, one.experts) for one in inner]
        slot = slot_numbers(layers, *slot_ranks) * number.itemsize
        check_memory(directory, (needed + slot) // shares, place, f"{dtype_name(number)} with one adapter slot")
    chosen = stored.quantization if stored else scheme
    tied = chosen is not None and bool(transformers_config(directory).tie_word_embeddings)
    quantized = QuantizedWeights.of(checkpoint, weights, scheme, tied=tied)
    split = None
    if group is not None:
        split = SplitModel.of(group, transformers_config(directory), manifest.sizes, chosen.group if chosen else 0)
    # On its way to another device a mapped weight takes no memory of its own.
    with open_slices(checkpoint, mapped=place.type != "cpu") as slices:
        auto, plan = transformers.AutoModelForCausalLM, split.plan if split else None
        options = loading_options(directory, quantized, plan, place)
        module = from_pretrained(auto, directory, plan.parts(slices) if plan else slices, number, paged.NAME, options)
    # With one, GPT-2 looks for padding in every batch, which waits for the device.
    module.config.pad_token_id = None
    _use_plain_linears(module)
    module.to(place)
    if quantized is not None:
        quantized.fill(module, number, place, split.own if split else {})
    context = AttentionContext()
    context.attach(module)
    joined = split.prepare(module) if split else []
    try:
        kv = probe_kv_shape(module, context, place)
    except ModelUnusableError as error:
        raise ModelUnusableError(f"{directory}: {error}") from None
    for handle in joined:
        handle.remove()
    return LoadedModel(
        module=module,
        device=place,
        dtype=number,
        end_token_ids=frozenset(manifest.end_token_ids),
        context_length=manifest.context_length,
        vocab_size=manifest.vocab_size,
        kv=kv,
        attention=context,
        linears=_linears(module),
        ends=_ends(module),
        experts=expert_tensors(module),
        directory=directory,
        pooling=manifest.pooling,
        parameters=parameters,
        quantized=quantized,
        split=split,
    )


def check_split(config: EngineConfig) -> None:
    """Check that a model can be divided among ranks, before they are started. Raises ModelUnusableError."""
    _read_config(Path(config.model))
    RankPlan(transformers_config(Path(config.model)), 0, config.tensor_parallel)
    device_of(rank_device(config.device, config.tensor_parallel - 1))


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise ModelUnusableError(f"{directory} is not a directory; a model is a transformers directory")
    try:
        config = read_config(directory)
        check_architecture(config)
    except (ArtifactError, ModelUnusableError) as error:
        raise ModelUnusableError(f"{directory}: {error}") from None
    return config


def _use_plain_linears(module: Any) -> None:
    """Replace GPT-2's Conv1D, which stores its weight [in, out], by nn.Linear: one kind to pack and to adapt."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is Conv1D:
                # Not linear_of: a weight that is read later, quantized, has no shape yet.
                linear = nn.Linear(child.nx, child.nf, device="meta")
                linear.weight = nn.Parameter(child.weight.t().contiguous(), requires_grad=False)
                linear.bias = nn.Parameter(child.bias, requires_grad=False)
                setattr(parent, name, linear)


def _linears(module: Any) -> dict[str, tuple[int, int]]:
    head = module.get_output_embeddings()
    return {
        name: (child.in_features, child.out_features)
        for name, child in module.named_modules()
        if is_linear(child) and child is not head
    }


def _ends(module: Any) -> dict[str, tuple[int, int]]:
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    names = {child: name for name, child in module.named_modules()}
    ends = {names[embedding]: (embedding.num_embeddings, embedding.embedding_dim)}
    return ends | ({names[head]: (head.in_features, head.out_features)} if is_linear(head) else {})


def device_of(name: str) -> torch.device:
    """Return the device of this name, with its number where it is one of several. Raises ModelUnusableError."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelUnusableError(f"device {name!r} is not known; use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ModelUnusableError(f"device {name!r} is not supported; use cpu or cuda")
    return _checked(device) if device.type == "cuda" else device


def _checked(device: torch.device) -> torch.device:
    """Return a CUDA device with its number. Raises ModelUnusableError where driver, GPU or compiler is none to use."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:  # torch's own sentence: of a build without CUDA, of the driver
        raise ModelUnusableError(f"device {str(device)!r}: {' '.join(str(error).split())}") from None
    count, index = torch.cuda.device_count(), device.index
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    if device.index >= count:
        raise ModelUnusableError(f"device {str(device)!r}: this machine has {count} CUDA devices, from cuda:0 on")
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        name = f"{torch.cuda.get_device_name(device)}, of compute capability {'.'.join(map(str, capability))}"
        raise ModelUnusableError(f"device {str(device)!r} is {name}: use one of 8.0 or later")
    if not os.environ.get("CC") and not shutil.which("gcc") and not shutil.which("clang"):
        raise ModelUnusableError("there is no C compiler, which Triton needs to launch kernels: install gcc, or set CC")
    try:
        from triton.runtime import driver

        _ = driver.active  # compiles a module of C
    except Exception as error:  # of the import, the compiler, the folder: they have no common class
        why = " ".join(str(error).split())
        raise ModelUnusableError(
            f"Triton cannot compile for {device}: {why}; install gcc, the headers of C's library and Python (libc6-dev "
            "python3-dev), and let TRITON_CACHE_DIR name a folder to write to"
        ) from error
    return device


def dtype_of(asked: str, config: Mapping[str, Any], first: TensorInfo, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in; "auto" is the model's own, by its config or by its first tensor.

    Raises ModelUnusableError.
    """
    name = own_dtype(config, first.dtype) if asked == "auto" else asked
    if asked == "auto" and name == "float16" and device.type == "cpu":
        works = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-untyped-call]
        name = cpu_dtype(name, bfloat16_works=bool(works))
        _log.warning("the model is in float16, which this CPU does not compute well: it runs in %s", name)
    if name not in DTYPE_BYTES:
        raise ModelUnusableError(f"dtype {name!r} is not supported; use auto, {', '.join(DTYPE_BYTES)}")
    if name == "float16" and device.type == "cpu":
        raise ModelUnusableError("dtype float16 is for CUDA; use bfloat16 or float32 on the CPU")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def check_memory(directory: Path, needed: int, device: torch.device, kind: str) -> None:
    """Raise ModelUnusableError where weights of so many bytes, of that kind, do not fit into the free memory."""
    available = available_bytes(device)
    if needed > available:
        raise ModelUnusableError(
            f"{directory}: the weights take {needed / 1e9:.1f} GB in {kind}, "
            f"and {available / 1e9:.1f} GB are available on {device}"
        )


def from_pretrained(
    auto: Any,
    directory: Path,
    slices: Mapping[str, Any],
    dtype: torch.dtype,
    attention: str | None,
    options: Mapping[str, Any],
    unused: Callable[[str], bool] = lambda name: False,
) -> Any:
    """Load a model by a class of transformers from slices of its weights; missing ones that are `unused` do not matter.

    `options` are those of loading_options. Raises ModelUnusableError, also where weights are missing: transformers
    would go on with random numbers.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        # The class itself: an automatic one takes no slices.
        loaded: Any = auto._model_mapping[type(options["config"])].from_pretrained(
            None,
            state_dict=slices,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # transformers raises errors of many kinds
        raise ModelUnusableError(f"{directory} can't be loaded: {' '.join(str(error).split())}") from error
    module, info = loaded
    for problem in ("missing_keys", "mismatched_keys"):
        names = sorted(str(key) for key in info[problem] if not unused(str(key)))
        if names:
            raise ModelUnusableError(f"{directory}: {problem.replace('_', ' ')} in the weights: {', '.join(names[:3])}")
    return module.eval().requires_grad_(False)


def choose_dtype(loaded: LoadedModel, dtype: str) -> LoadedModel:
    """Choose the dtype in which a model computes on the CPU; `dtype` may be "auto".

    A bfloat16 model then computes in float32 over its bfloat16 weights, where the processor has no instructions for
    products of bfloat16: that is exact, and faster by an eighth. The result's dtype says so. A model that is split, or
    quantized, computes in its own.
    """
    module = loaded.module
    if loaded.device.type != "cpu" or loaded.split is not None or loaded.quantized is not None:
        return loaded
    if dtype != "auto" or loaded.dtype != torch.bfloat16 or multiplies_bfloat16():
        return loaded
    if _other_bytes(module) >= available_bytes(loaded.device):
        return loaded
    _log.info("the model computes in float32: this processor has no instructions for products of bfloat16")
    _compute_in(module, torch.float32)
    return replace(loaded, dtype=torch.float32)


def lay_out(loaded: LoadedModel) -> None:
    """Replace the linear layers of a model on the CPU. Raises ModelUnusableError where it has no kernel for one."""

    def make(linear: AnyLinear) -> nn.Module:
        layer = laid_out(linear, loaded.dtype)
        if layer is None:
            assert isinstance(linear, QuantizedLinear)
            raise ModelUnusableError(
                f"{loaded.directory}: this processor has no kernel for {codes_name(linear)} weights; "
                "load the model without --quantize, or an unquantized checkpoint"
            )
        name = next(iter(loaded.ends))
        embedding = loaded.module.get_submodule(name)
        # A tied weight. Other kinds of embeddings multiply its rows.
        if type(embedding) is nn.Embedding and embedding.weight is linear.weight and not isinstance(layer, nn.Linear):
            from loraplex.worker.engine.linear.layer import PanelEmbedding, PanelLayer  # as in panels()

            if isinstance(layer, PanelLayer):
                loaded.module.set_submodule(name, PanelEmbedding(layer, loaded.dtype))
        return layer

    if not panels_work(loaded.dtype, loaded.dtype):
        _log.warning("this processor lacks kernels: an answer may depend on its batch, and takes long")
    replace_linears(loaded.module, make)
    lay_out_experts(loaded.module, loaded.dtype)
    # The first layouts of the weights, and what quantizing took: 0.4 of 1.3 GB with 0.4 B parameters.
    return_freed_memory()


def _other_bytes(module: nn.Module) -> int:
    """Return the bytes in float32 of all parameters but the linear layers' weights, which stay as they are."""
    linear_weights = {id(layer.weight) for layer in module.modules() if is_linear(layer)}
    embeddings = [layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Embedding)]
    others = (parameter.numel() for parameter in module.parameters() if id(parameter) not in linear_weights)
    return 4 * (sum(others) + sum(embeddings))


def _compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast everything but the linear layers, whose layouts take inputs of that dtype over the weights as they are."""
    for child in module.modules():
        if isinstance(child, QuantizedEmbedding):
            child.dtype = dtype
        if is_linear(child):
            continue
        # A new parameter: a tied weight stays in its dtype in the output head.
        for name, parameter in list(child.named_parameters(recurse=False)):
            if parameter.is_floating_point():
                setattr(child, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
        for name, buffer in list(child.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(child, name, buffer.to(dtype))
