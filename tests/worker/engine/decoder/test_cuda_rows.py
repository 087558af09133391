"""Normalizations, gates and rotations on CUDA, without a GPU: which modules they compute; they compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from bench.launches import measure
from loraplex.contracts.artifacts.families import KvShape
from loraplex.worker.engine.attention.paged import AttentionStep, KvCache, LayerCall
from loraplex.worker.engine.model.loader import load_model
from loraplex.worker.engine_api import ModelUnusableError
from tests.worker.engine.triton_runs import compiled_for

pytest.importorskip("triton", reason="Triton is for Linux")
pytestmark = pytest.mark.model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_normalization_is_known_by_its_numbers(dtype: torch.dtype) -> None:
    from loraplex.worker.engine.decoder.residuals import NormForm, norm_form

    class Doubling(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden_states)

    llama, gemma = LlamaRMSNorm(48, 1e-5).to(dtype), Gemma2RMSNorm(48, 1e-6).to(dtype)
    early = norm_form(llama, dtype)
    assert early is not None
    assert (early.epsilon, early.offset) == (1e-5, 0.0)
    if dtype == torch.bfloat16:
        assert not early.late, "its product with the weight is of rounded numbers"
        assert norm_form(gemma, dtype) == NormForm(1e-6, 1.0, late=True)
    for other in (Doubling(48, 1e-5).to(dtype), nn.LayerNorm(48, dtype=dtype), nn.Linear(4, 4, dtype=dtype)):
        assert norm_form(other, dtype) is None
    assert norm_form(llama.float() if dtype == torch.bfloat16 else llama.bfloat16(), dtype) is None


def test_a_gated_mlp_is_known_by_its_numbers() -> None:
    from loraplex.worker.engine.decoder.cuda import gate_of

    config: Any = LlamaConfig(hidden_size=32, intermediate_size=48)
    assert gate_of(LlamaMLP(config), torch.bfloat16) == "silu"  # type: ignore[no-untyped-call]
    for activation, gate in (("gelu_pytorch_tanh", "gelu"), ("relu", None)):
        config.hidden_activation = activation
        assert gate_of(Gemma2MLP(config), torch.bfloat16) == gate  # type: ignore[no-untyped-call]


def test_a_layer_is_known_by_what_it_adds(tiny_llama: Any) -> None:
    from loraplex.worker.engine.decoder.residuals import LAYER_FORMS, adds_residuals

    layer = load_model(str(tiny_llama.directory)).module.model.layers[0]
    assert adds_residuals(layer, LAYER_FORMS[0])

    class Scaling(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states: Any, **named: Any) -> Any:
            return super().forward(hidden_states * 0.5, **named)

    class Rotating(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states: Any, position_embeddings: Any, **named: Any) -> Any:
            return super().forward(hidden_states, position_embeddings=position_embeddings[::-1], **named)

    for other in (Scaling, Rotating):
        layer.__class__ = other
        assert not adds_residuals(layer, LAYER_FORMS[0])


def test_an_attention_that_rotates_all_features_is_known_by_its_numbers(tiny_llama: Any, tiny_qwen2: Any) -> None:
    from loraplex.worker.engine.decoder.cuda import attention_form

    for tiny in (tiny_llama, tiny_qwen2):
        loaded = load_model(str(tiny.directory))
        attention = loaded.module.model.layers[1].self_attn
        widths = [attention.q_proj.out_features, attention.k_proj.out_features, attention.v_proj.out_features]
        form = attention_form(attention, widths, torch.float32)
        assert form is not None
        assert (form.call.layer, form.call.scaling, list(form.widths)) == (1, form.dim**-0.5, widths)

        class Unrotated(type(attention)):  # type: ignore[misc]
            def forward(self, hidden_states: Any, position_embeddings: Any, **named: Any) -> Any:
                cos, sin = position_embeddings
                still = torch.ones_like(cos), torch.zeros_like(sin)
                return super().forward(hidden_states, position_embeddings=still, **named)

        attention.__class__ = Unrotated
        assert attention_form(attention, widths, torch.float32) is None


@pytest.mark.usefixtures("kept_compilations")
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.nightly), 90])
def test_the_kernels_compile(capability: int) -> None:
    from loraplex.worker.engine.decoder.cuda import QueryKeyNorms, RotaryForm, gate_call
    from loraplex.worker.engine.decoder.residuals import NormForm, NormKernel, norm_call

    x, out = torch.zeros(8, 8192, dtype=torch.bfloat16), torch.zeros(8, 4096, dtype=torch.bfloat16)
    form = NormForm(1e-5, 0.0, late=False)
    norm = NormKernel(form, out[0])
    calls = norm_call(norm, x[:, :4096], out), norm_call(norm, out, out, out, out, norm), gate_call(x, out)
    for call in (*calls, gate_call(x, out, gelu=True)):
        compiled = compiled_for(capability, call)
        assert "ld.global.v4" in compiled.asm["ptx"], "rows are read 16 bytes at a time"
    norms = (None, *(QueryKeyNorms(form, x[0, :size], x[0, :size]) for size in (128, 4096)))
    attentions = [RotaryForm(LayerCall(0, x, x, x, 1.0), 32, 8, 128, 128, both) for both in norms]
    rows, angles = (
        torch.zeros(8, sum(attentions[0].widths), dtype=torch.bfloat16),
        torch.zeros(8, 128, dtype=torch.bfloat16),
    )
    for int8 in (False, True):
        cache = KvCache(KvShape(1, 8, 128, 128), 1, 16, torch.bfloat16, torch.device("cpu"), int8=int8)
        plan: Any = None
        step = AttentionStep(cache, torch.zeros(8, dtype=torch.int64), plan)
        for attention in attentions[: 1 if int8 else 3]:
            compiled_for(capability, attention.rotate_call(x, rows, angles, angles, step))


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
