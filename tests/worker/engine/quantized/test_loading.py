"""Test the memory of a model that is quantized while it loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.contracts.artifacts.quantization import Quantization
from loraplex.worker.engine import torch_engine
from loraplex.worker.engine.model import loader
from loraplex.worker.engine.model.loader import LoadedModel, load_model
from loraplex.worker.engine.quantized.stored import _Preparing, loading_options
from loraplex.worker.engine.quantized.weight import QuantizedWeight, equal, quantize_weight
from loraplex.worker.engine_api import ModelUnusableError
from loraplex.worker.plan import PlanSettings, plan
from tests.worker.engine.model.tiny_families import make_config, make_model

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = ["int8", "int8-zero-point", "int4", "int4-128+embeddings"]


def quantized(loaded: LoadedModel) -> dict[str, QuantizedWeight]:
    layers = ((name, getattr(layer, "weight", None)) for name, layer in loaded.module.named_modules())
    return {name: weight for name, weight in layers if isinstance(weight, QuantizedWeight)}


def weight_bytes(weight: QuantizedWeight) -> int:
    tensors = [weight.codes, weight.scales, *([] if weight.zeros is None else [weight.zeros])]
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_weights_take_the_bytes_that_are_planned(tiny_qwen2: Any, scheme: str) -> None:
    loaded = load_model(str(tiny_qwen2.directory), quantize=scheme)
    # Tied embeddings and head share their weight.
    weights = {id(weight): weight for weight in quantized(loaded).values()}.values()
    given = {id(parameter): parameter.nbytes for parameter in loaded.module.parameters()}
    planned = plan(PlanSettings(str(tiny_qwen2.directory), quantize=scheme))
    assert sum(map(weight_bytes, weights)) + sum(given.values()) == planned.weight_bytes
    assert (
        loaded.parameters
        == planned.parameters
        == sum(parameter.numel() for parameter in load_model(str(tiny_qwen2.directory)).module.parameters())
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_do_not_depend_on_the_dtype_that_is_computed_in(tiny_llama: Any, scheme: str) -> None:
    wide = load_model(str(tiny_llama.directory), dtype="float32", quantize=scheme)
    narrow = load_model(str(tiny_llama.directory), dtype="bfloat16", quantize=scheme)
    ours, theirs = quantized(wide), quantized(narrow)
    assert set(ours) == set(theirs) >= {"model.layers.0.self_attn.q_proj"}
    assert all(equal(weight, theirs[name]) for name, weight in ours.items())
    assert {parameter.dtype for parameter in narrow.module.parameters()} == {torch.bfloat16}
    assert wide.linears == load_model(str(tiny_llama.directory)).linears
    assert wide.ends == load_model(str(tiny_llama.directory)).ends


def test_transformers_does_not_complain_of_layers_that_are_read_apart(
    tiny_llama: Any, caplog: pytest.LogCaptureFixture
) -> None:
    load_model(str(tiny_llama.directory), quantize="int8")
    assert "UNEXPECTED" not in caplog.text


def test_no_block_of_the_device_s_memory_is_reserved_for_all_weights(tiny_llama: Any) -> None:
    """Such a block never returns the memory of weights that are freed when layers are fused."""
    from transformers.modeling_utils import get_total_byte_count

    module, device = load_model(str(tiny_llama.directory)).module, torch.device("cuda")
    options = loading_options(tiny_llama.directory, None, None, device)
    places = {name: device for name, _ in module.named_parameters()}
    assert sum(get_total_byte_count(module, places, None).values()) > 0
    assert sum(get_total_byte_count(module, places, _Preparing(options["quantization_config"])).values()) == 0


def test_memory_is_checked_by_the_bytes_of_the_scheme(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = plan(PlanSettings(str(tiny_llama.directory), quantize="int8")).weight_bytes
    monkeypatch.setattr(loader, "available_bytes", lambda device: needed)
    load_model(str(tiny_llama.directory), quantize="int8")
    with pytest.raises(ModelUnusableError, match=r"the weights take .* GB in float32, and"):
        load_model(str(tiny_llama.directory))
    monkeypatch.setattr(loader, "available_bytes", lambda device: needed - 1)
    with pytest.raises(ModelUnusableError, match=r"the weights take .* GB in int8, and"):
        load_model(str(tiny_llama.directory), quantize="int8")


def test_the_same_memory_holds_more_blocks_of_int8(
    tmp_path: Path, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(make_config("llama"), tmp_path)
    monkeypatch.setattr(torch_engine, "available_bytes", lambda device: 2 << 20)
    blocks = [make_engine(tmp_path, rows=64, kv_cache_dtype=name).limits.blocks for name in ("", "int8")]
    # A quarter of the memory, by blocks of 16 tokens of 2 layers, 2 KV heads and 8 numbers, keys and values.
    assert blocks == [(512 << 10) // (16 * 2 * 2 * 2 * size) for size in (8 * 4, 8 + 4)]
    with pytest.raises(
        ModelUnusableError, match=r"--kv-blocks: 99999999 blocks of 16 tokens do not fit .* holds 512; use"
    ):
        make_engine(tmp_path, kv_blocks=99_999_999)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [("fp8", "--quantize: fp8 needs a CUDA device"), ("int3", "--quantize: 'int3' is not one of")],
)
def test_schemes_that_are_refused(tiny_llama: Any, scheme: str, message: str) -> None:
    with pytest.raises(ModelUnusableError, match=message):
        load_model(str(tiny_llama.directory), quantize=scheme)


def test_fp8_codes_are_the_nearest(one_thread: None) -> None:
    """fp8 is for CUDA; the definition of its codes holds anywhere."""
    weight = torch.randn(9, 40, generator=torch.Generator().manual_seed(1))
    coded = quantize_weight(weight, Quantization(8, symmetric=True, floating=True))
    assert coded.codes.dtype == torch.float8_e4m3fn
    # Three bits after the point; below the smallest normal number steps have one size.
    bound = (weight.abs() / 16).maximum(coded.scales * 2.0**-10)
    assert ((coded.dequantize() - weight).abs() <= bound * 1.001).all()


def test_pieces_of_many_rows_are_quantized_alike() -> None:
    weight = torch.randn(5000, 8, generator=torch.Generator().manual_seed(2))
    for scheme in (Quantization(8, symmetric=True), Quantization(4, symmetric=False, group=4)):
        whole = quantize_weight(weight, scheme)
        assert equal(whole.rows(slice(4000, 4200)), quantize_weight(weight[4000:4200], scheme))
