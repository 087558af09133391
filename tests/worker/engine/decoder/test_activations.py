"""Activations that torch computes: a row's bits are the same beside any others, whatever number of threads computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers.activations import ACT2FN

from loraplex.worker.engine.decoder.cpu import in_whole_vectors, with_whole_sigmoids


@pytest.fixture(params=[1, 2, 5, 7, 10])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gelu_pytorch_tanh", "silu"])
def test_a_row_is_computed_as_alone(name: str, dtype: torch.dtype) -> None:
    function = in_whole_vectors(ACT2FN[name])
    # The width of Gemma 3 1B, half vectors, and half of wider rows, as where gate and up are one product.
    for width, whole in ((6912, 6912), (48, 48), (16, 32)):
        x = torch.randn(40, whole, generator=torch.Generator().manual_seed(1)).to(dtype)[:, :width]
        alone = torch.cat([function(row[None]) for row in x])
        torch.testing.assert_close(alone, ACT2FN[name](x))
        for rows in (2, 3, 7, 11, 40):
            assert torch.equal(function(x[:rows]), alone[:rows]), f"{rows} rows"
    assert function(x[:0]).shape == x[:0].shape


def test_more_threads_than_a_row_has_vectors_for_end_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 512)
    x = torch.randn(16_448, generator=torch.Generator().manual_seed(1))
    assert torch.equal(in_whole_vectors(torch.neg)(x), -x)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", [1, 8, 40])
def test_sigmoids_of_a_mixture_of_experts_are_computed_by_row(width: int) -> None:
    function = with_whole_sigmoids(torch.nn.functional.sigmoid)
    x = torch.randn(2_000, width, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([function(row[None]) for row in x])
    for rows in (2, 3, 7, 17, 40, 2_000):
        assert torch.equal(function(x[:rows]), alone[:rows]), f"{rows} rows"
