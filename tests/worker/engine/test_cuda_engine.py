"""The engine with the layers that it has on CUDA, their kernels interpreted: the logits and the ids are peft's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.worker.engine.peft_oracle import VOCAB, PeftOracle
from tests.worker.engine.triton_runs import result_of

pytest.importorskip("triton", reason="Triton is for Linux")
pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "some of a group": {"r": 2, "lora_alpha": 6, "target_modules": ["k_proj", "gate_proj"], "use_rslora": True},
    "patterned": {
        "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 20, "layers.1.*q_proj": 1},
    },
    "DoRA": {"r": 5, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"]},
}  # fmt: skip
ROWS = 6
SETTINGS = {"rows": ROWS, "kv_blocks": 60, "block_size": 4, "adapter_slots": 2, "max_rank": 20, "step_tokens": 16}


def test_mixed_adapters_give_pefts_logits_and_tokens(tmp_path: Path) -> None:
    """More adapters than slots, rows without one, prompts in chunks; with decode steps in padded buffers and without.

    Qwen2 has biases on q, k and v alone.
    """
    chance = random.Random(2)
    oracle = PeftOracle("qwen2", tmp_path, CONFIGS, shape={"num_hidden_layers": 2, "hidden_size": 32})
    rows = [*CONFIGS, None, "all"]
    prompts = [chance.choices(range(VOCAB), k=length) for length in (2, 11, 5, 7, 1, 20)]
    requests = {
        f"{number}: {name}": oracle.request(f"{number}: {name}", prompt, 5, name)
        for number, (name, prompt) in enumerate(zip(rows, prompts, strict=True))
    }
    case = {
        "model": str(oracle.directory),
        "settings": SETTINGS,
        "requests": {
            key: (request.prompt_ids, request.stopping.max_tokens, request.adapter and request.adapter.directory)
            for key, request in requests.items()
        },
    }
    cases = [case | {"buffers": False}, case | {"buffers": True, "settings": SETTINGS | {"ahead": True}}]
    eager, padded = result_of("cuda_engine_cases.py", "cpu", cases)
    assert eager["padded"] == 0 < padded["padded"]
    for answer in (eager["answers"], padded["answers"]):
        assert answer.keys() == requests.keys()
        for name, (key, (ids, logprobs)) in zip(rows, answer.items(), strict=True):
            oracle.check_answer(requests[key], tuple(ids), logprobs, name)
        assert len({tuple(ids) for ids, _ in answer.values()}) == len(rows), "answers are to be diverse"
