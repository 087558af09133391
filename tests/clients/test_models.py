"""`loraplex models`: what the list says of a model."""

from __future__ import annotations

import dataclasses

import pytest
from loraplex_client import Module

from clients.cli.models import layer_count, read_model, registered


def test_layers_are_counted_and_not_modules() -> None:
    assert layer_count(registered(read_model("examples/model", ""))) == 6
    assert layer_count(registered(read_model("hash:?", ""))) == 0


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (["h.0.attn", "h.0.mlp", "h.1.attn", "lm_head"], 2),
        (["encoder.layer.0.a", "encoder.layer.11.a"], 2),
        (["model.layers.0.mlp.experts.0.w1", "model.layers.0.mlp.experts.1.w1"], 1),
    ],
)
def test_layers_of_other_names(names: list[str], layers: int) -> None:
    model = registered(read_model("hash:?", ""))
    assert layer_count(dataclasses.replace(model, modules=tuple(Module(name, 1, 1) for name in names))) == layers
