"""Every family that is served against transformers' own choices, each request alone: the sweep behind the list.

Tiny random float32 models with windows shorter than the prompts, in so few blocks that sequences are preempted, with
chunked prefill beside decodes, and a request that finds another's prompt in the cache. Where peft comes in, adapters of
every layer that the store would let through.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.families import FAMILIES, kv_shape
from loraplex.contracts.options import Encode, StoppingParams
from loraplex.worker.engine_api import NewSequence
from tests.worker.engine.model.tiny_families import (
    CRAMPED,
    LAST_ARRIVAL,
    NEW_TOKENS,
    PROMPTS,
    VOCAB,
    Tiny,
    answer,
    check_answer,
    make_config,
    make_model,
    make_tiny,
    requests_of,
)

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

# Families of `make test`, each of a form of its own: rotary and learned positions, parts of heads rotated, windows and
# softcaps, experts, latent attention.
OFTEN = {"llama", "gpt2", "gpt_neox", "gemma2", "mixtral", "deepseek_v3"}


@pytest.mark.parametrize(
    "model_type",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.nightly) for name in sorted(FAMILIES)],
)
def test_a_family_answers_as_transformers_does(
    model_type: str,
    tmp_path: Path,
    save_adapter: Callable[..., None],
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from loraplex.worker.engine.model.loader import load_model

    loads: list[Any] = []

    def keep(*arguments: Any, **options: Any) -> Any:
        loads.append(load_model(*arguments, **options))
        return loads[-1]

    tiny = make_tiny(model_type, tmp_path, save_adapter)
    monkeypatch.setattr("loraplex.worker.engine.torch_engine.load_model", keep)
    engine = make_engine(tiny.directory, **CRAMPED)
    manifest, [loaded] = read_base_model(str(tiny.directory)), loads
    adaptable = {one.name: dataclasses.astuple(one)[1:] for one in manifest.modules}
    linears = {name: (*sizes, 0) for name, sizes in {**loaded.linears, **loaded.ends}.items()}
    assert adaptable == {**linears, **loaded.experts}
    assert bool(loaded.experts) == FAMILIES[model_type].experts
    assert (manifest.architecture, manifest.context_length, manifest.vocab_size) == (model_type, 128, VOCAB)
    assert kv_shape(json.loads(manifest.files["config.json"])) == loaded.kv

    requests = requests_of(tiny)
    # Until the adapter is there, steps pass that nobody counted.
    run_until_idle(engine, {0: [replace(requests[0], prompt_ids=(5,), stopping=StoppingParams(max_tokens=1))]})
    waiting: list[int] = []
    outputs = run_until_idle(
        engine, {0: requests[:3], LAST_ARRIVAL: requests[3:]}, lambda _: waiting.append(engine.stats().rows_waiting)
    )
    answers = {name: tuple(token for output in some for token in output.token_ids) for name, some in outputs.items()}
    assert len({token for ids in answers.values() for token in ids}) >= 10, "answers are to be diverse"
    assert all(len(ids) == NEW_TOKENS for ids in answers.values())
    if tiny.adapter:
        assert answers == {str(index): ids for index, ids in enumerate(tiny.answers)}
    else:
        for index, prompt in enumerate(PROMPTS):
            check_answer(tiny.model, prompt, answers[str(index)])
    assert any(after > before for before, after in pairwise(waiting[LAST_ARRIVAL:])), "nobody was preempted"
    assert outputs["3"][0].cached_tokens == 16

    embed = NewSequence("mean", PROMPTS[0], stopping=StoppingParams(max_tokens=0), encode=Encode("embed", "mean"))
    [output] = run_until_idle(engine, {0: [embed]})["mean"]
    assert output.vector == pytest.approx(tiny.mean.tolist(), abs=1e-4 * max(1.0, float(tiny.mean.abs().max())))


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_bigcode", "gpt_neox", "opt"])
def test_fields_that_a_family_does_not_read_leave_its_kv_shape_alone(
    model_type: str, tmp_path: Path, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from loraplex.worker.engine.model.loader import load_model

    make_model(make_config(model_type), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"head_dim": 16, "num_key_value_heads": 2, "kv_lora_rank": 16}
    file.write_text(json.dumps(config))
    assert load_model(str(tmp_path)).kv == kv_shape(config)
    # GPT-NeoX's rotary embeddings do read head_dim.
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    tiny = Tiny(tmp_path, None, [answer(model, prompt) for prompt in PROMPTS])
    outputs = run_until_idle(make_engine(tmp_path, **CRAMPED), {0: requests_of(tiny)})
    answers = {name: tuple(token for output in some for token in output.token_ids) for name, some in outputs.items()}
    assert answers == {str(index): ids for index, ids in enumerate(tiny.answers)}


def test_gpt2_checkpoints_without_the_prefix_are_the_same_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from loraplex.worker.engine.model.loader import load_model

    make_model(make_config("gpt2"), tmp_path)
    whole = load_model(str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("transformer."): one for name, one in weights.items()}, tmp_path / "model.safetensors")
    loaded = load_model(str(tmp_path))
    assert loaded.linears == whole.linears
    assert {*loaded.linears, *loaded.ends} == {one.name for one in read_base_model(str(tmp_path)).modules}
    for (name, one), other in zip(loaded.module.state_dict().items(), whole.module.state_dict().values(), strict=True):
        assert one.equal(other), name
