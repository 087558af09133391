"""Test which layouts a model's layers get, where time is counted by the layers themselves."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loraplex.worker.engine.linear import choice, layouts
from loraplex.worker.engine.linear.choice import LayoutChoice, measured, unmeasured
from loraplex.worker.engine.linear.layouts import Layout, float_layouts
from loraplex.worker.engine.model import loader
from loraplex.worker.engine.model.loader import choose_layouts, lay_out, load_model
from loraplex.worker.engine.quantized.layers import AnyLinear, QuantizedLinear
from loraplex.worker.engine.quantized.weight import quantize
from loraplex.worker.engine_api import ModelUnusableError
from tests.worker.engine.model.tiny_families import make_config, make_model

pytestmark = pytest.mark.usefixtures("one_thread")


class _Timed(nn.Module):
    """A layer that takes its milliseconds of a clock, for each row where `by_row`."""

    clock = 0.0

    def __init__(self, ms: float, *, by_row: bool = False) -> None:
        super().__init__()
        self._ms, self._by_row = ms, by_row

    def forward(self, x: Tensor) -> Tensor:
        _Timed.clock += self._ms / 1e3 * (len(x) if self._by_row else 1)
        return x


def _timed(name: str, ms: float, *, by_row: bool = False) -> Layout:
    return Layout(name, lambda linear: _Timed(ms, by_row=by_row))


def _model(*layers: AnyLinear) -> nn.Module:
    # Every shape twice: one that is there once is taken for a head.
    return nn.Sequential(*layers, *copy.deepcopy(layers))


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, torch.dtype], list[Layout]]:
    """The layouts by kind of weight and dtype of inputs, to be filled."""
    found: dict[tuple[str, torch.dtype], list[Layout]] = {}

    def of(kind: str, compute: torch.dtype, *, rounded: bool) -> Iterator[Layout]:
        return (layout for layout in found[kind, compute] if rounded or "rounded" not in layout.name)

    monkeypatch.setattr(choice, "_layouts", of)
    monkeypatch.setattr(choice, "time", SimpleNamespace(perf_counter=lambda: _Timed.clock))
    return found


F32, BF16 = torch.float32, torch.bfloat16


def test_the_fastest_for_one_and_for_many_rows_is_chosen_and_said(
    offered: dict[tuple[str, torch.dtype], list[Layout]], caplog: pytest.LogCaptureFixture
) -> None:
    offered["float32", F32] = [_timed("even", 2), _timed("slow", 9), _timed("by row", 1, by_row=True)]
    with caplog.at_level(logging.INFO):
        chosen = measured(_model(nn.Linear(8, 4)), F32, [F32])
    assert (chosen.compute, chosen.layouts["float32"].name) == (F32, "even")
    assert "computes in float32, its linear layers as even" in caplog.text
    assert "even with float32 inputs 4.0 ms" in caplog.text
    assert "slow with float32 inputs 18.0 ms" in caplog.text


def test_another_dtype_has_to_be_much_faster(offered: dict[tuple[str, torch.dtype], list[Layout]]) -> None:
    model = _model(nn.Linear(8, 4).bfloat16())
    for ms, dtype in ((10.0, BF16), (9.5, BF16), (8.0, F32)):
        offered["bfloat16", BF16], offered["bfloat16", F32] = [_timed("own", 10)], [_timed("other", ms)]
        assert measured(model, BF16, [BF16, F32]).compute == dtype


def test_inputs_are_rounded_only_for_models_of_fewer_bits(
    offered: dict[tuple[str, torch.dtype], list[Layout]],
) -> None:
    model = _model(QuantizedLinear(quantize(torch.randn(4, 16), 8)), nn.Linear(8, 4))
    for dtype in (F32, BF16):
        offered["int8", dtype] = [_timed("exact", 2), _timed("rounded", 1)]
        offered["float32", dtype] = [_timed("float", 1)]
    assert measured(model, F32, [F32]).layouts["int8"].name == "exact"
    assert measured(model, BF16, [BF16]).layouts["int8"].name == "rounded"


def test_every_layout_of_a_weight_computes_it(two_threads: None) -> None:
    linear = nn.Linear(33, 21).requires_grad_(False).bfloat16()
    x = torch.randn(3, 33)
    for compute, tolerance in ((F32, 1e-5), (BF16, 2e-2)):
        expected = nn.functional.linear(x.to(compute).float(), linear.weight.float(), linear.bias.float())
        found = list(float_layouts(BF16, compute))
        assert found
        for layout in found:
            y = layout.make(linear)(x.to(compute))
            assert y.dtype == compute
            torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance)


def test_small_models_are_not_measured(tiny_qwen2: Any) -> None:
    loaded = load_model(str(tiny_qwen2.directory))
    assert choose_layouts(loaded, "auto") is loaded


@pytest.mark.skipif(not layouts.multiplies_bfloat16(), reason="no products of bfloat16 on this processor")
def test_nothing_is_measured_where_the_processor_multiplies_bfloat16(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that measured might choose layouts with other bits, and a stream that moves would turn."""
    make_model(make_config("qwen2"), tmp_path).bfloat16().save_pretrained(tmp_path)
    monkeypatch.setattr(loader, "_UNMEASURED_PARAMETERS", 0)
    monkeypatch.setattr(loader, "measured", lambda *given: pytest.fail("measured"))
    chosen = choose_layouts(load_model(str(tmp_path)), "auto")
    assert chosen.layouts is not None
    assert (chosen.dtype, chosen.layouts.layouts["bfloat16"].name) == (BF16, "bfloat16 panels")


@pytest.mark.model
@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_a_bfloat16_model_that_computes_in_float32_is_the_model_in_float32(
    model_type: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(make_config(model_type), tmp_path).bfloat16().save_pretrained(tmp_path)
    monkeypatch.setattr(loader, "_UNMEASURED_PARAMETERS", 0)
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(loader, "measured", lambda module, own, computes: unmeasured(module, computes[-1]))
    mixed = choose_layouts(load_model(str(tmp_path)), "auto")
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
    monkeypatch.setattr(layouts, "packing_works", lambda dtype: False)
    lay_out(load_model(str(tiny_qwen2.directory)))
    loaded = load_model(str(tiny_qwen2.directory), quantize="int4")
    for given in (loaded, replace(loaded, layouts=LayoutChoice(F32, {}))):
        with pytest.raises(ModelUnusableError, match="no kernel for int4 weights; load the model without --quantize"):
            lay_out(given)


def test_a_kernel_that_goes_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex.worker.engine.linear.layer import PanelLinear

    layouts._panels_work.cache_clear()
    monkeypatch.setattr(PanelLinear, "forward", lambda self, x: x.new_zeros(len(x), self.out_features))
    assert [layout.name for layout in float_layouts(BF16, F32) if "panels" in layout.name] == []
    layouts._panels_work.cache_clear()
