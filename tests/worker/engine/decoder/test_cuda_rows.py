"""Normalizations, gates and rotations on CUDA, without a GPU: they compile, and how many a layer launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from bench.launches import measure
from loraplex.contracts.artifacts.families import KvShape
from loraplex.worker.engine.attention.paged import AttentionStep, KvCache, LayerCall
from loraplex.worker.engine.decoder.recognition import AttentionForm, Norm
from loraplex.worker.engine_api import ModelUnusableError
from tests.worker.engine.triton_runs import compiled_for

pytest.importorskip("triton", reason="Triton is for Linux")
pytestmark = pytest.mark.model


@pytest.mark.usefixtures("kept_compilations")
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.nightly), 90])
def test_the_kernels_compile(capability: int) -> None:
    from loraplex.worker.engine.decoder.cuda import gate_call, norm_call, rotate_call

    x, out = torch.zeros(8, 8192, dtype=torch.bfloat16), torch.zeros(8, 4096, dtype=torch.bfloat16)
    norm = Norm(out[0], 1e-5)
    calls = norm_call(norm, x[:, :4096], out), norm_call(norm, out, out, out, out, norm), gate_call(x, out)
    for call in (*calls, gate_call(x, out, gelu=True)):
        compiled = compiled_for(capability, call)
        assert "ld.global.v4" in compiled.asm["ptx"], "rows are read 16 bytes at a time"
    norms = (None, *((Norm(x[0, :size], 1e-5), Norm(x[0, :size], 1e-5)) for size in (128, 4096)))
    attentions = [AttentionForm(32, 8, 128, 128, 128, LayerCall(0, x, x, x, 1.0), both) for both in norms]
    rows, angles = (
        torch.zeros(8, sum(attentions[0].widths), dtype=torch.bfloat16),
        torch.zeros(8, 128, dtype=torch.bfloat16),
    )
    for int8 in (False, True):
        cache = KvCache(KvShape(1, 8, 128, 128), 1, 16, torch.bfloat16, torch.device("cpu"), int8=int8)
        plan: Any = None
        step = AttentionStep(cache, torch.zeros(8, dtype=torch.int64), plan)
        for attention in attentions[: 1 if int8 else 3]:
            compiled_for(capability, rotate_call(attention, x, rows, angles, angles, step))


@pytest.mark.usefixtures("kept_compilations")
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (90, torch.bfloat16),
        *(pytest.param(*form, marks=pytest.mark.nightly) for form in ((80, torch.float32), (100, torch.bfloat16))),
    ],
)
def test_the_product_of_batch_invariance_compiles(capability: int, dtype: torch.dtype) -> None:
    from loraplex.worker.engine.decoder.invariant import multiply_call

    x, y = torch.zeros(100, 256, dtype=dtype), torch.zeros(100, 6144, dtype=dtype)
    call = multiply_call(y, x, torch.zeros(6144, 256, dtype=dtype), torch.zeros(6144, dtype=dtype))
    assert call.grid == (2, 6144 // 32), "tiles depend on the layer, not on the rows"
    compiled_for(capability, call)


def test_a_model_whose_rows_may_depend_on_each_other_is_refused() -> None:
    from loraplex.worker.engine.decoder.invariant import InvariantLinear, use_invariant_products

    config: Any = LlamaConfig(hidden_size=32, intermediate_size=48)
    model = nn.ModuleDict({"mlp": LlamaMLP(config)})  # type: ignore[no-untyped-call]
    use_invariant_products(model)
    assert isinstance(model.get_submodule("mlp.up_proj"), InvariantLinear)
    model["norm"] = LlamaRMSNorm(48)
    with pytest.raises(ModelUnusableError, match="--batch-invariant: the rows of norm, a LlamaRMSNorm, may depend"):
        use_invariant_products(model)


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_the_launches_of_a_layer(quick: bool) -> None:
    """An operator of torch's more in each layer would show here."""
    ratios = measure(quick).ratios
    assert ratios["launches_a_layer"] <= 10
    assert ratios["launches_a_layer_adapters"] <= 18
