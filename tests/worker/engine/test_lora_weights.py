"""Adapters read from peft's files have the numbers that peft itself computes with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.worker.engine.lora.base_layers import ModelLayers
from loraplex.worker.engine.lora.weights import pack_adapter, read_adapter
from loraplex.worker.engine.model.loader import load_model

pytestmark = pytest.mark.usefixtures("one_thread")


def layers(tiny: Any) -> ModelLayers:
    return ModelLayers(load_model(str(tiny.directory)))


@pytest.mark.parametrize("adapter", ["plain", "patterned", "rslora"])
def test_the_product_is_pefts_own_change_of_the_weight(tiny_llama: Any, adapter: str) -> None:
    """With any max_rank: a scaling by the padded rank was once an engine's mistake."""
    read = [read_adapter(str(tiny_llama.adapters[adapter]), layers(tiny_llama), max_rank) for max_rank in (16, 64)]
    adapted = 0
    for name, module in tiny_llama.peft.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight") and adapter in module.lora_A:
            adapted += 1
            for weights in read:
                pair = weights.pairs[name]
                assert pair.a.shape[0] == module.r[adapter]
                torch.testing.assert_close((pair.a.t() @ pair.b).t(), module.get_delta_weight(adapter).float())
    assert adapted == len(read[0].pairs) > 0
    assert read[0].rank == max(pair.a.shape[0] for pair in read[0].pairs.values())


def test_the_ranks_of_the_patterned_adapter_differ(tiny_llama: Any) -> None:
    weights = read_adapter(str(tiny_llama.adapters["patterned"]), layers(tiny_llama), 16)
    assert {pair.a.shape[0] for pair in weights.pairs.values()} == {2, 4, 12}


def test_weights_are_cast_after_they_are_scaled(tiny_llama: Any) -> None:
    exact = read_adapter(str(tiny_llama.adapters["rslora"]), layers(tiny_llama), 16)
    cast = pack_adapter(exact, torch.bfloat16).weights
    for name, pair in cast.pairs.items():
        assert exact.pairs[name].b.dtype == torch.float32
        assert torch.equal(pair.a, exact.pairs[name].a.bfloat16())
        assert torch.equal(pair.b, exact.pairs[name].b.bfloat16())
        assert pair.a.is_contiguous()
        assert pair.b.is_contiguous()


def test_they_are_read_wherever_they_lie_in_the_file(tiny_llama: Any, tmp_path: Path) -> None:
    """A header of any length is allowed, so tensors need not be aligned."""
    directory = tiny_llama.adapters["plain"]
    shutil.copy(directory / CONFIG_FILE, tmp_path)
    data = (directory / WEIGHTS_FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length] + b" "
    (tmp_path / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    expected = read_adapter(str(directory), layers(tiny_llama), 16)
    read = read_adapter(str(tmp_path), layers(tiny_llama), 16)
    assert read.pairs.keys() == expected.pairs.keys()
    assert all(map(torch.equal, read.tensors, expected.tensors))
