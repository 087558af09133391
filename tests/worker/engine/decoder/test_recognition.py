"""Modules are known by the numbers that they compute, whatever their names and their device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Phi3Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from loraplex.worker.engine.decoder.recognition import LLAMA, attention_form, gate_form, layer_form, norm_form
from loraplex.worker.engine.lora.base_layers import FusedProduct, fuse, place_parts
from loraplex.worker.engine.model.loader import load_model

pytestmark = pytest.mark.model


def fused(module: Any, *names: str) -> Any:
    """The module with layers of these names as one product."""
    linears = [getattr(module, name) for name in names]
    place_parts(module, names, FusedProduct(fuse(linears), [linear.out_features for linear in linears]))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_normalization_is_known_by_its_numbers(dtype: torch.dtype) -> None:
    class Doubling(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden_states)

    llama, gemma = LlamaRMSNorm(48, 1e-5).to(dtype), Gemma2RMSNorm(48, 1e-6).to(dtype)
    early = norm_form(llama, dtype)
    assert early is not None
    assert early.weight is llama.weight
    assert (early.epsilon, early.offset) == (1e-5, 0.0)
    if dtype == torch.bfloat16:
        assert not early.late, "its product with the weight is of rounded numbers"
        late = norm_form(gemma, dtype)
        assert late is not None
        assert late.kind == (1e-6, 1.0, True)
    for other in (Doubling(48, 1e-5).to(dtype), nn.LayerNorm(48, dtype=dtype), nn.Linear(4, 4, dtype=dtype)):
        assert norm_form(other, dtype) is None
    assert norm_form(llama.float() if dtype == torch.bfloat16 else llama.bfloat16(), dtype) is None


def test_a_gated_mlp_is_known_by_its_numbers() -> None:
    class Limited(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = self.act_fn(self.gate_proj(x)).clamp(max=7.0)
            result: torch.Tensor = self.down_proj(gate * self.up_proj(x))
            return result

    config: Any = LlamaConfig(hidden_size=32, intermediate_size=48)
    names = "gate_proj", "up_proj"
    assert gate_form(fused(LlamaMLP(config), *names), torch.bfloat16) == "silu"  # type: ignore[no-untyped-call]
    assert gate_form(fused(Limited(config), *names), torch.bfloat16) is None  # type: ignore[no-untyped-call]
    assert gate_form(LlamaMLP(config), torch.bfloat16) is None, "its layers are no product"  # type: ignore[no-untyped-call]
    for activation, gate in (("gelu_pytorch_tanh", "gelu"), ("relu", None)):
        config.hidden_activation = activation
        assert gate_form(fused(Gemma2MLP(config), *names), torch.bfloat16) == gate  # type: ignore[no-untyped-call]
    one = Phi3MLP(Phi3Config(hidden_size=32, intermediate_size=48, pad_token_id=0))  # type: ignore[no-untyped-call]
    assert gate_form(fused(one, "gate_up_proj"), torch.float32) == "silu"


def test_a_layer_is_known_by_what_it_adds(tiny_llama: Any) -> None:
    layer = load_model(str(tiny_llama.directory)).module.model.layers[0]
    assert layer_form(layer) == LLAMA

    class Scaling(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states: Any, **named: Any) -> Any:
            return super().forward(hidden_states * 0.5, **named)

    class Rotating(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states: Any, position_embeddings: Any, **named: Any) -> Any:
            return super().forward(hidden_states, position_embeddings=position_embeddings[::-1], **named)

    for other in (Scaling, Rotating):
        layer.__class__ = other
        assert layer_form(layer) is None


def test_an_attention_is_known_by_its_numbers(tiny_llama: Any, tiny_qwen2: Any) -> None:
    for tiny in (tiny_llama, tiny_qwen2):
        attention = load_model(str(tiny.directory)).module.model.layers[1].self_attn
        names = "q_proj", "k_proj", "v_proj"
        widths = tuple(getattr(attention, name).out_features for name in names)
        form = attention_form(fused(attention, *names), torch.float32, 100, 0)
        assert form is not None
        assert (form.call.layer, form.call.scaling, form.widths) == (1, form.key_dim**-0.5, widths)
        assert form.columns == form.key_dim

        class Turning(type(attention)):  # type: ignore[misc]
            factor = 0.0

            def forward(self, hidden_states: Any, position_embeddings: Any, **named: Any) -> Any:
                cos, sin = position_embeddings
                turned = 1 + self.factor * (cos - 1), self.factor * sin
                return super().forward(hidden_states, position_embeddings=turned, **named)

        attention.__class__ = Turning
        still = attention_form(attention, torch.float32, 100, 0)
        assert still is not None
        assert still.columns == 0
        Turning.factor = 0.5
        assert attention_form(attention, torch.float32, 100, 0) is None
