"""The whole engine on the device: in float32 the ids that transformers gives on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.contracts.artifacts.families import FAMILIES
from loraplex.worker.engine.model.runner import DecodeGraphs
from loraplex.worker.engine.torch_engine import TorchEngine, build_engine
from loraplex.worker.engine_api import EngineConfig, NewSequence, Output
from tests.worker.engine.model.tiny_families import EXPERTS
from tests.worker.engine.peft_oracle import VOCAB, PeftOracle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

# Few blocks: prompts are cut into chunks, and running sequences preempt each other.
CRAMPED: dict[str, Any] = {
    "rows": 6, "kv_blocks": 26, "block_size": 4, "step_tokens": 16, "adapter_slots": 3, "max_rank": 16,
}  # fmt: skip


@pytest.fixture
def make_engine() -> Iterator[Callable[..., TorchEngine]]:
    """Builds engines that are closed after the test."""
    engines = []

    def make(tiny: Any, dtype: str, **settings: Any) -> TorchEngine:
        # Results of a step must not depend on the clock.
        engine = build_engine(EngineConfig(str(tiny.directory), "cuda", dtype, **settings), paced=False)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def requests(tiny: Any, adapters: tuple[str | None, ...]) -> list[NewSequence]:
    chance = random.Random(5)
    made = []
    for number in range(14):
        prompt = [chance.randrange(3, 320) for _ in range(chance.choice([1, 3, 8, 17, 30, 52]))]
        made.append(tiny.request(f"r{number}", prompt, chance.randrange(2, 36), adapters[number % len(adapters)]))
    return made


def answers(engine: TorchEngine, sequences: list[NewSequence]) -> dict[str, tuple[int, ...]]:
    """Each sequence's ids. They arrive one by one, while others run."""
    ids: dict[str, tuple[int, ...]] = {sequence.sequence_id: () for sequence in sequences}
    waiting, unfinished = list(sequences), set(ids)
    while unfinished:
        if waiting:
            engine.add_sequence(waiting.pop(0))
        for output in engine.step():
            ids[output.sequence_id] += tuple(output.token_ids)
            if output.finish:
                unfinished.remove(output.sequence_id)
    return ids


@pytest.mark.parametrize("adapters", [(None,), (None, "plain", "patterned", "rslora")])
def test_cuda_gives_the_ids_of_transformers(
    tiny: Any,
    adapters: tuple[str | None, ...],
    make_engine: Callable[..., TorchEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replayed: set[bool] = set()
    replay = DecodeGraphs.replay

    def watched(graphs: DecodeGraphs, size: int, *, adapted: bool) -> torch.Tensor:
        replayed.add(adapted)
        return replay(graphs, size, adapted=adapted)

    monkeypatch.setattr(DecodeGraphs, "replay", watched)
    sequences = requests(tiny, adapters)
    expected = {sequence.sequence_id: tiny.expected(sequence) for sequence in sequences}
    assert len(set(expected.values())) == len(sequences)
    engine = make_engine(tiny, "float32", **CRAMPED)
    assert engine._runner._graphs is not None, "decode steps were to be captured"
    assert answers(engine, sequences) == expected
    # With adapters among the rows as well as without.
    assert replayed == ({False, True} if any(adapters) else {False})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_runs_to_the_end(tiny: Any, dtype: str, make_engine: Callable[..., TorchEngine]) -> None:
    sequences = requests(tiny, (None, "plain", "patterned", "rslora"))
    ids = answers(make_engine(tiny, dtype, rows=16, adapter_slots=3, max_rank=16), sequences)
    assert all(ids.values())
    assert len({token for some in ids.values() for token in some}) > 20


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2", "mixtral", "gpt_oss"])
def test_logits_and_tokens_on_cuda_are_pefts(
    model_type: str, tmp_path: Path, make_engine: Callable[..., TorchEngine]
) -> None:
    """Plain adapters and DoRA in one batch: float32 sums in another order, to 1e-4 of the largest logit.

    Of experts as well, which DoRA is not for.
    """
    fan_in = {"fan_in_fan_out": True} if model_type == "gpt2" else {}
    has_experts = FAMILIES[model_type].experts
    targets: dict[str, Any] = {"target_modules": ["q_proj", "o_proj"] if has_experts else "all-linear"}
    experts = {"target_parameters": ["gate_up_proj", "down_proj"]} if has_experts else {}
    configs: dict[str, dict[str, Any]] = {
        "plain": {"r": 8, "lora_alpha": 16} | targets | experts | fan_in,
        "rooted": {"r": 16, "lora_alpha": 4, "use_rslora": True} | targets | experts | fan_in,
        "DoRA": {"r": 5, "lora_alpha": 8, "use_dora": True} | targets | fan_in,
    }
    oracle = PeftOracle(model_type, tmp_path, configs, shape=EXPERTS | {"head_dim": 16} if has_experts else None)
    chance = random.Random(4)
    rows = [*configs, None] * 2
    sequences = {
        f"{number}: {name}": oracle.request(f"{number}: {name}", chance.choices(range(VOCAB), k=9), 10, name)
        for number, name in enumerate(rows)
    }
    outputs: dict[str, list[Output]] = {key: [] for key in sequences}
    engine = make_engine(oracle, "float32", rows=8, adapter_slots=2, max_rank=16, max_expert_rank=16)
    for sequence in sequences.values():
        engine.add_sequence(sequence)
    while not all(some and some[-1].finish for some in outputs.values()):
        for output in engine.step():
            outputs[output.sequence_id].append(output)
    for name, (key, sequence) in zip(rows, sequences.items(), strict=True):
        oracle.check(sequence, outputs[key], name)


def test_slots_are_taken_before_kv_blocks_are_counted(tiny: Any, make_engine: Callable[..., TorchEngine]) -> None:
    """And not when the first adapter comes, to memory that the KV cache has."""
    engine = make_engine(tiny, "float32", rows=2, adapter_slots=4, max_rank=64)
    before = torch.cuda.memory_allocated()
    groups = engine._runner._lora.lora._groups.values()  # type: ignore[attr-defined]
    assert sum(group.a.nbytes + group.b.nbytes for group in groups) < before
    answers(engine, requests(tiny, ("plain",))[:2])
    assert torch.cuda.memory_allocated() - before < 1 << 22
