"""A model on two ranks gives one process's ids and logits. `make ranks` is the long form.

The ranks are forks of the test's process, but in the test of a real rank's death.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.artifacts.families import FAMILIES
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine_api import EngineConfig, ModelUnusableError, NewSequence
from tests.worker.engine.ranks.families import compare, make_adapters, make_wide, requests_of
from tests.worker.engine.ranks.forked import fork_ranks

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks: a process of its own takes seconds to import torch."""
    fork_ranks(monkeypatch)


# Families that transformers has no plan to divide.
REFUSED = {"gpt2", "gpt_bigcode", "gpt_oss", "hunyuan_v1_dense", "opt", "persimmon", "stablelm"}
TIED = {"qwen2"}
CASES = [("llama", 2, ""), ("qwen2", 2, "int4"), pytest.param("mixtral", 4, "int8", marks=pytest.mark.nightly)]
if os.environ.get("FAMILIES") == "all":
    schemes = "int4-128", "int8-zero-point", "int4+embeddings", "int8+embeddings"
    CASES = [*product(sorted(FAMILIES.keys() - REFUSED), (2, 4), ("", "int8", "int4"))]
    CASES += [*product(("llama", "qwen2"), (2, 4), schemes)]


@pytest.mark.parametrize(("model_type", "ranks", "scheme"), CASES)
def test_ranks_give_one_processs_ids_and_logits(
    model_type: str,
    ranks: int,
    scheme: str,
    tmp_path: Path,
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
    save_adapter: Callable[..., None],
) -> None:
    model = make_wide(model_type, tmp_path / "model", tie_word_embeddings=model_type in TIED)
    adapters = make_adapters(tmp_path / "model", tmp_path, experts=FAMILIES[model_type].experts)
    if FAMILIES[model_type].experts:
        adapters[2] = tmp_path / "experts"
        names = ["experts.gate_up_proj", "experts.down_proj"]
        save_adapter(model, adapters[2], 3, r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=names)
    requests = requests_of(adapters)
    difference = compare(tmp_path / "model", requests, ranks, make_engine, run_until_idle, quantize=scheme)
    assert difference < 1e-4


@pytest.mark.skipif(os.environ.get("FAMILIES") != "all", reason="make ranks runs it")
@pytest.mark.parametrize(("ranks", "scheme"), [*product((2, 4), ("int4", "int8-zero-point"))])
def test_a_quantized_checkpoint_is_divided_too(
    ranks: int, scheme: str, tmp_path: Path, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    from loraplex.model_tools.quantized_copy import write_copy

    make_wide("llama", tmp_path / "model")
    write_copy(str(tmp_path / "model"), str(tmp_path / "copy"), scheme)
    requests = requests_of(make_adapters(tmp_path / "copy", tmp_path, experts=False))
    assert compare(tmp_path / "copy", requests, ranks, make_engine, run_until_idle) < 1e-4


def test_ids_that_were_just_sampled_reach_all_ranks(
    tmp_path: Path, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    """An engine that steps ahead lays a step out before it has the ids of the one before."""
    make_wide("llama", tmp_path)
    assert compare(tmp_path, requests_of([]), 2, make_engine, run_until_idle, ahead=True) < 1e-4


@pytest.mark.parametrize(
    ("model_type", "ranks", "why"),
    [
        ("gpt2", 2, "transformers has no plan to divide GPT2LMHeadModel; leave it out"),
        ("llama", 3, "--tensor-parallel 3: LlamaForCausalLM has 8 attention heads, which cannot be divided among so"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_a_rank_starts(
    model_type: str, ranks: int, why: str, tmp_path: Path
) -> None:
    from loraplex.worker.engine.torch_engine import build_engine

    make_wide(model_type, tmp_path)
    with pytest.raises(ModelUnusableError, match=why):
        build_engine(EngineConfig(str(tmp_path), tensor_parallel=ranks))


def test_a_ranks_death_is_told_at_once(tmp_path: Path, make_engine: Callable[..., Any]) -> None:
    from loraplex.worker.engine import torch_engine

    make_wide("llama", tmp_path)
    lost, gone = [], threading.Event()

    def on_lost(rank: int, why: Any) -> None:
        lost.append((rank, why))
        gone.set()

    engine = torch_engine.build_engine(
        EngineConfig(str(tmp_path), dtype="float32", kv_blocks=8, rows=1, tensor_parallel=2), on_lost=on_lost
    )
    engine.add_sequence(NewSequence("a", (1, 2, 3), stopping=StoppingParams(4)))
    assert engine.step()
    assert engine._followers is not None
    engine._followers._processes[0].kill()
    assert gone.wait(60)
    assert lost == [(1, None)]
    with pytest.raises(Exception):  # noqa: B017, PT011 - gloo's and the socket's have no common class
        engine.step()
    engine.close()
