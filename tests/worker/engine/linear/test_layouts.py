"""The layout of a linear layer follows from its weight and the processor alone, and computes the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from loraplex.worker.engine.linear import layouts
from loraplex.worker.engine.linear.layouts import laid_out
from loraplex.worker.engine.model import loader
from loraplex.worker.engine.model.loader import choose_dtype, lay_out, load_model
from loraplex.worker.engine.quantized.layers import QuantizedLinear
from loraplex.worker.engine.quantized.weight import quantize
from loraplex.worker.engine_api import ModelUnusableError
from tests.worker.engine.model.tiny_families import make_config, make_model

pytestmark = pytest.mark.usefixtures("one_thread")


F32, BF16 = torch.float32, torch.bfloat16


def _linear(dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(96, 64).requires_grad_(False).to(dtype)


@pytest.mark.parametrize("has_tiles", [False, True])
def test_a_layout_follows_from_the_weight_and_the_processor(has_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that measured would choose layouts with other bits, and a stream that moves would turn."""
    from loraplex.worker.engine.linear.layer import FixedLinear, PanelLinear

    monkeypatch.setattr(layouts, "multiplies_tiles", lambda: has_tiles)
    codes = QuantizedLinear(quantize(torch.randn(64, 96), 8))
    for linear in (_linear(F32), _linear(BF16), codes):
        assert type(laid_out(linear, F32)) is PanelLinear
    assert type(laid_out(_linear(BF16), BF16)) is PanelLinear
    assert type(laid_out(codes, BF16)) is (PanelLinear if has_tiles else FixedLinear)
    rounded = QuantizedLinear(replace(codes.weight, dynamic=True))
    assert [type(laid_out(rounded, dtype)) for dtype in (F32, BF16)] == [FixedLinear] * 2


def test_float32_weights_that_are_bfloat16s_take_half_the_bytes_and_give_the_same_bits() -> None:
    wide = _linear(BF16).float()
    x = torch.randn(8, 96)
    narrow, panels = laid_out(wide, F32), layouts.panels(wide, F32)
    assert narrow is not None
    assert [cast(Any, layer).panels.format for layer in (narrow, panels)] == ["bfloat16", "float32"]
    assert torch.equal(narrow(x), panels(x))


@pytest.mark.parametrize("panels", [True, False])
def test_every_layout_of_a_weight_computes_it(panels: bool, two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not panels:
        monkeypatch.setattr(layouts, "_panels_work", lambda *given, **options: False)
    linear = nn.Linear(33, 21).requires_grad_(False).bfloat16()
    x = torch.randn(3, 33)
    for compute, tolerance in ((F32, 1e-5), (BF16, 2e-2)):
        expected = nn.functional.linear(x.to(compute).float(), linear.weight.float(), linear.bias.float())
        layer = laid_out(linear, compute)
        assert layer is not None
        y = layer(x.to(compute))
        assert y.dtype == compute
        torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.model
@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_a_bfloat16_model_that_computes_in_float32_is_the_model_in_float32(
    model_type: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(make_config(model_type), tmp_path).bfloat16().save_pretrained(tmp_path)
    own = load_model(str(tmp_path))
    if layouts.multiplies_bfloat16():
        assert choose_dtype(own, "auto") is own
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda: False)
    assert choose_dtype(own, "bfloat16") is own
    mixed = choose_dtype(own, "auto")
    assert mixed.dtype == F32
    for loaded in (mixed, wide := load_model(str(tmp_path), dtype="float32")):
        lay_out(loaded)
    ids = torch.arange(5, 25)[None]
    expected = _logits(wide, ids)
    torch.testing.assert_close(_logits(mixed, ids), expected, rtol=1e-5, atol=1e-5)


def _logits(loaded: Any, ids: Tensor) -> Tensor:
    shapes: Callable[[Any], Tensor] = lambda call: call.query  # noqa: E731  # stands for attention, in both alike
    with torch.inference_mode(), loaded.attention.during(type("Attention", (), {"attend": staticmethod(shapes)})()):
        output = loaded.module(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False)
    logits: Tensor = output.logits
    return logits


def test_a_processor_without_a_kernel(tiny_qwen2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unquantized weights keep torch's products; quantized ones are refused in one line."""
    monkeypatch.setattr(layouts, "_panels_work", lambda *given, **options: False)
    lay_out(load_model(str(tiny_qwen2.directory)))
    loaded = load_model(str(tiny_qwen2.directory), quantize="int4")
    with pytest.raises(ModelUnusableError, match="no kernel for int4 weights; load the model without --quantize"):
        lay_out(loaded)


def test_a_kernel_that_goes_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex.worker.engine.linear.layer import PanelLinear

    layouts._panels_work.cache_clear()
    monkeypatch.setattr(PanelLinear, "forward", lambda self, x: x.new_zeros(len(x), self.out_features))
    assert not isinstance(laid_out(_linear(BF16), F32), PanelLinear)
    layouts._panels_work.cache_clear()
