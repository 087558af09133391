"""An engine's steps on a fake CUDA device: no step waits for it, and no kernel is compiled once the engine serves."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import fake_cuda
from bench.device_requests import SAMPLINGS, draw_requests, run_requests
from bench.fake_cuda import fake_engine
from loraplex.contracts.grammars.build import choices_grammar, regex_grammar
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine.model.runner import DecodeGraphs, Runner
from loraplex.worker.engine.quantized.weight import QuantizedWeight
from loraplex.worker.engine.scheduling.batch import Batch
from loraplex.worker.engine_api import AdapterSource, CaptureFailedError, EngineConfig, ModelUnusableError, NewSequence
from tests.drawn_schemas import byte_tokenizer
from tests.tiny_models import TinyModel
from tests.worker.engine.model.tiny_families import VOCAB, make_config, make_model
from tests.worker.engine.scheduling.paged_model import Prophet

pytest.importorskip("triton", reason="Triton is for Linux")
pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

ROWS = 6
ADAPTERS = {"a": "/", "b": "/"}


@pytest.fixture(scope="module")
def tiny_llama(make_tiny: Callable[..., TinyModel]) -> TinyModel:
    """Two layers of it: every further one launches what the second does."""
    return make_tiny("llama", num_hidden_layers=2)


def test_a_step_never_waits_for_the_device(tiny_llama: Any) -> None:
    """A step is launched before the one before it is done, whatever its rows ask for."""
    config = EngineConfig(str(tiny_llama.directory), "cuda", rows=ROWS, block_size=4, kv_blocks=60, step_tokens=16)
    with fake_engine(config) as (engine, _):
        for turn, (name, sampling) in enumerate(SAMPLINGS.items()):
            prompt = tuple(range(3 + turn, 23 + turn))  # of which no block is cached
            for number, prompt_logprobs in enumerate((None, 2)):
                stopping = StoppingParams(3, min_tokens=2)
                engine.add_sequence(
                    NewSequence(
                        f"{name} {number}", prompt, sampling=sampling, stopping=stopping, logprobs=2,
                        prompt_logprobs=prompt_logprobs, adapter=AdapterSource("a", "/"),
                    )
                )  # fmt: skip
            ended = 0
            while ended < 2:
                outputs = engine.step()
                assert not [output.failure for output in outputs if output.failure], name
                ended += sum(output.finish is not None for output in outputs)


@pytest.mark.parametrize("quantize", ["", "int8"])
def test_everything_of_an_engine_is_on_its_own_device(quantize: str, tiny_llama: Any) -> None:
    """The fake device checks each launch: Triton launches on the current device, wherever a kernel's tensors are."""
    config = EngineConfig(
        str(tiny_llama.directory), "cuda:1", rows=2, block_size=4, kv_blocks=20, step_tokens=16, quantize=quantize
    )
    with fake_engine(config) as (engine, fake):
        engine.add_sequence(NewSequence("one", (1, 2, 3), stopping=StoppingParams(2), adapter=AdapterSource("a", "/")))
        while engine.has_work():
            assert not [output.failure for output in engine.step() if output.failure]
        assert fake.current == 1


@pytest.fixture(scope="module")
def directory(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a tokenizer."""
    directory = tmp_path_factory.mktemp("formats")
    for file in tiny_llama.directory.iterdir():
        os.link(file, directory / file.name)
    (directory / "tokenizer.json").write_text(byte_tokenizer(320))
    return directory


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        pytest.param("float32", {"batch_invariant": True}, marks=pytest.mark.nightly),
        ("bfloat16", {"kv_cache_dtype": "int8"}),
    ],
)
def test_no_kernel_is_compiled_once_the_engine_serves(
    dtype: str, more: dict[str, Any], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compilation takes up to two seconds, in which no answer goes on, and the worker is taken for stalled.

    REQUESTS=300 takes over 500 steps: `make compilations`.
    """
    from loraplex.worker.engine.attention import kernels

    # Short splits, so that prompts have several of them.
    monkeypatch.setattr(kernels, "CHUNK_SPLIT", 64)
    config = EngineConfig(
        str(directory), "cuda", rows=ROWS, block_size=4, kv_blocks=120, step_tokens=16, adapter_slots=2, max_rank=16,
        dtype=dtype, **more,
    )  # fmt: skip
    chance, count = random.Random(3), int(os.environ.get("REQUESTS", "12"))
    grammars = [choices_grammar(["yes, it is", "no"]), regex_grammar("[a-c]+")]
    with fake_engine(config) as (engine, device):
        ready = set(device.compiled)
        steps = run_requests(engine, draw_requests(count, chance, ADAPTERS, grammars, longest=90), chance)
        print(f"{count} requests, {steps} steps, {len(device.compiled) - len(ready)} compilations")
        assert steps >= 2 * count
        assert set(device.compiled) - ready == set()
        launched = {one.kernel.__name__ for one in device.kernels}
        decodes = "attend_chunks" if more.get("batch_invariant") else "attend_splits"
        assert {decodes, "attend_chunks", "combine_chunks", "shrink_rows", "expand_rows", "weigh_parts"} <= launched
        served = device.kernels[-1000:]
        assert {one.kernel.__name__ for one in served} >= {decodes, "combine_chunks"}


def test_a_step_with_drafts_is_a_captured_graph_and_compiles_nothing(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is collected before the next one is scheduled, whose drafts need its ids."""
    replayed: list[int] = []
    replay = DecodeGraphs.replay

    def watched(graphs: DecodeGraphs, size: int, *, adapted: bool) -> torch.Tensor:
        replayed.append(size)
        return replay(graphs, size, adapted=adapted)

    monkeypatch.setattr(DecodeGraphs, "replay", watched)
    config = EngineConfig(str(tiny_llama.directory), "cuda", rows=ROWS, block_size=4, kv_blocks=60, step_tokens=16)
    with fake_engine(config) as (engine, device):
        ready = set(device.compiled)
        engine._scheduler.drafter = prophet = Prophet(lambda _: [0] * 60, 320, 0.9, random.Random(1))
        for name, adapter in (("one", None), ("two", AdapterSource("a", "/"))):
            stopping = StoppingParams(40, ignore_eos=True)
            engine.add_sequence(NewSequence(name, (1, 2, 3), stopping=stopping, adapter=adapter))
        while engine.has_work():
            assert not [output.failure for output in engine.step() if output.failure]
        stats = engine.stats()
        print(f"{prophet.steps} of {stats.steps} steps had drafts, {stats.accepted} of {stats.drafted} ids accepted")
        assert prophet.steps > 5
        assert set(replayed) == {1, 2, 4, 6}
        assert set(device.compiled) == ready


def test_a_step_does_not_dequantize_weights(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product is one launch over the codes, in decode steps and beside prompts, and compiled beforehand."""

    def dequantize(*_: Any) -> None:
        raise AssertionError("a weight is dequantized")

    config = EngineConfig(
        str(tiny_llama.directory), "cuda", rows=ROWS, block_size=4, kv_blocks=60, step_tokens=80, quantize="int4",
        adapter_slots=2, max_rank=16,
    )  # fmt: skip
    chance = random.Random(3)
    with fake_engine(config) as (engine, device):
        ready, before = set(device.compiled), len(device.kernels)
        monkeypatch.setattr(QuantizedWeight, "dequantize", dequantize)
        steps = run_requests(engine, draw_requests(8, chance, ADAPTERS), chance)
        assert set(device.compiled) - ready == set()
        products = [one for one in device.kernels[before:] if one.kernel.__name__ == "multiply_codes"]
        # Of steps that no graph replays: q, k and v, o, gate and up, down, in two layers.
        assert 0 < len(products) <= 8 * steps
        assert len(products) % 8 == 0


@pytest.mark.parametrize(("capability", "captured"), [((9, 0), True), ((8, 9), False)])
def test_products_of_experts_that_wait_are_not_captured(
    capability: tuple[int, int],
    captured: bool,
    tmp_path: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed capture would leave torch's allocator capturing, so it is decided before."""
    make_model(make_config("mixtral"), tmp_path)
    monkeypatch.setattr(fake_cuda, "CAPABILITY", capability)
    config = EngineConfig(str(tmp_path), "cuda", rows=1, block_size=4, kv_blocks=8, dtype="bfloat16")
    with fake_engine(config) as (engine, _):
        assert (engine._runner._graphs is not None) == captured
    assert ("without CUDA graphs: torch's grouped products" in caplog.text) != captured


def test_a_step_of_experts_adapters_does_not_wait_either(tmp_path: Any) -> None:
    """A table of tiles is written by the device, which alone knows the pairs."""
    model = make_model(make_config("mixtral"), tmp_path)
    assert model.config.vocab_size == VOCAB
    config = EngineConfig(
        str(tmp_path), "cuda", rows=ROWS, block_size=4, kv_blocks=60, step_tokens=16, adapter_slots=2, max_rank=16,
        max_expert_rank=4, dtype="bfloat16",
    )  # fmt: skip
    chance = random.Random(3)
    with fake_engine(config) as (engine, device):
        ready = set(device.compiled)
        run_requests(engine, draw_requests(8, chance, ADAPTERS, vocabulary=VOCAB), chance)
        assert set(device.compiled) - ready == set()
        assert {"tile_pairs", "shrink_rows", "expand_rows"} <= {one.kernel.__name__ for one in device.kernels}


def test_the_kv_cache_takes_what_the_largest_step_leaves(tiny_llama: Any) -> None:
    """A step leaves its memory to the next one: what is free after the largest step is needed by none."""
    config = EngineConfig(str(tiny_llama.directory), "cuda", rows=ROWS, step_tokens=24, adapter_slots=2, max_rank=16)
    with fake_engine(config) as (_, device):
        before = device.kernels[: device.memory_reads[-1]]
        chunks = [one for one in before if one.kernel.__name__ == "attend_chunks"]
        decodes = [one for one in before if one.kernel.__name__ == "attend_splits"]
        assert max(len(one.arguments["query"]) for one in chunks) == 24
        assert max(one.grid[0] for one in decodes) == ROWS
        # Capturing returns that memory to the device, where another process could take it.
        after = [one for one in device.kernels[device.captured_at :] if one.kernel.__name__ == "attend_chunks"]
        assert max(len(one.arguments["query"]) for one in after) == 24


def test_slots_are_fewer_where_memory_is_short(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(str(tiny_llama.directory), "cuda", rows=2, kv_blocks=8, max_rank=16, fewer_slots=True)
    with fake_engine(config) as (engine, _):
        assert engine.limits.adapter_slots == 32
    monkeypatch.setattr(fake_cuda, "FREE_BYTES", 1 << 20)
    with fake_engine(config) as (engine, _):
        assert 1 < engine.limits.adapter_slots < 16
        assert engine.stats().slots_used == 0
        engine.add_sequence(NewSequence("a", (5, 6), stopping=StoppingParams(2), adapter=AdapterSource("a", "/")))
        while engine.has_work():
            assert not [output.failure for output in engine.step() if output.failure]
    assert f"memory holds {engine.limits.adapter_slots} adapter slots of rank 16" in caplog.text


def test_limits_whose_largest_step_has_no_room_are_refused(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(runner: Runner, batch: Batch) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Runner, "launch", launch)
    config = EngineConfig(str(tiny_llama.directory), "cuda", rows=ROWS, step_tokens=24)
    message = "a step of --rows 6 and --step-tokens 24 does not fit in the memory of cuda:0"
    with pytest.raises(ModelUnusableError, match=message), fake_engine(config):
        pass


def test_an_engine_whose_sampling_fails_does_not_start(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row would fail alone, and the worker would claim the next."""
    from loraplex.worker.engine.sampling import cuda

    def choose(*_: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(cuda, "choose_calls", choose)
    config = EngineConfig(str(tiny_llama.directory), "cuda", rows=ROWS, kv_blocks=60)
    with pytest.raises(ModelUnusableError, match="no token could be sampled on cuda:0"), fake_engine(config):
        pass


@pytest.mark.parametrize("step_tokens", [1, 2, 7])
def test_the_first_steps_of_small_limits(step_tokens: int, tiny_llama: Any) -> None:
    config = EngineConfig(str(tiny_llama.directory), "cuda", rows=1, step_tokens=step_tokens, kv_blocks=8)
    with fake_engine(config) as (engine, _):
        engine.add_sequence(NewSequence("a", (5, 6, 7), stopping=StoppingParams(2)))
        assert [output.token_ids for _ in range(6) for output in engine.step()]


def test_one_stream_captures_all_graphs(tiny_llama: Any) -> None:
    """A workspace of cuBLAS is taken for every stream that it is used on."""
    config = EngineConfig(str(tiny_llama.directory), "cuda", rows=ROWS, kv_blocks=60)
    with fake_engine(config) as (engine, device):
        assert len(engine._runner._graphs._graphs) == 8  # type: ignore[union-attr]
        assert device.streams == 1


def test_an_engine_whose_capture_fails_is_built_again_without_graphs(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.errors import OutOfResources

    def capture(*_: Any) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(DecodeGraphs, "__init__", capture)
    config = EngineConfig(str(tiny_llama.directory), "cuda", rows=ROWS, kv_blocks=60)
    why = "decode steps run without CUDA graphs, capturing them failed: out of resource: shared memory"
    with pytest.raises(CaptureFailedError, match=why), fake_engine(config):
        pass
    with fake_engine(replace(config, graphs=False)) as (engine, _):
        engine.add_sequence(NewSequence("a", (5, 6), stopping=StoppingParams(3)))
        assert [output.token_ids for _ in range(6) for output in engine.step()]
