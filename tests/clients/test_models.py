"""`loraplex models`: what the list says of a model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loraplex.cli.__main__ import app
from loraplex.cli.models import layer_count, read_model, registered
from loraplex.cli.terminal import CommandError
from loraplex_client import Module

EXAMPLE = Path("examples/model")


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


@pytest.fixture
def proposing(tmp_path: Path) -> Path:
    """The example model with a generation_config.json that proposes how to sample."""
    directory = tmp_path / "proposing"
    shutil.copytree(EXAMPLE, directory)
    content = json.loads((EXAMPLE / "generation_config.json").read_text())
    content |= {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


async def models(store: str, *arguments: str) -> str:
    done = await asyncio.to_thread(CliRunner().invoke, app, ["models", *arguments, "--store", store])
    if done.exception is not None:
        raise done.exception
    return done.output


async def test_the_list_shows_what_requests_get_that_leave_sampling_unset(store: str, proposing: Path) -> None:
    proposed = "temperature 0.6, top_k 20, repetition_penalty 1.05"
    assert proposed in await models(store, "push", str(proposing))
    second = await models(store, "push", str(EXAMPLE), "--name", "plain")
    assert "generation_config" not in second
    assert "the store has proposing too: requests that name no model" in second
    assert "requests that name no model" not in await models(store, "push", str(EXAMPLE), "--name", "plain")
    listed = {model["name"]: model["generation_config"] for model in json.loads(await models(store, "list", "--json"))}
    given = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert listed == {"proposing": given, "plain": {}}
    rows = (await models(store, "list")).splitlines()
    assert [proposed in row for row in rows[1:]] == [row.startswith("proposing") for row in rows[1:]]


def test_a_bad_value_is_refused_by_file_and_field(proposing: Path) -> None:
    file = proposing / "generation_config.json"
    file.write_text('{"do_sample": true, "top_p": "0.9"}')
    with pytest.raises(CommandError) as refused:
        read_model(str(proposing), "")
    assert str(refused.value) == f"{file}: top_p: '0.9' is not a number; correct it or take it out"
