"""The engine with the layers that it has on CUDA, their kernels interpreted: the logits and the ids are peft's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.worker.engine.peft_oracle import VOCAB, PeftOracle
from tests.worker.engine.quantized.dequantized import dequantize_into
from tests.worker.engine.triton_runs import result_of
from worker.engine_api import NewSequence

pytest.importorskip("triton", reason="Triton is for Linux")
pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "some of a group": {"r": 2, "lora_alpha": 6, "target_modules": ["k_proj", "gate_proj"], "use_rslora": True},
    "patterned": {
        "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 20, "layers.1.self_attn.q_proj": 1},
    },
    "DoRA": {"r": 5, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"]},
}  # fmt: skip
ROWS = 6
SETTINGS = {"rows": ROWS, "kv_blocks": 60, "block_size": 4, "adapter_slots": 2, "max_rank": 20, "step_tokens": 16}
# A machine that computes on CUDA needs no numba: what it imports is there without. The cases run on a CPU and need it.
WITHOUT_NUMBA = """
import sys
sys.modules.update(numba=None, llvmlite=None)
import worker.engine.torch_engine, worker.engine.process, worker.engine.model.runner
import worker.engine.lora.base_layers, worker.engine.lora.adapter_memory
import bench.gpu, worker.engine.lora.cuda, tests.gpu.test_engine_on_cuda
del sys.modules["numba"], sys.modules["llvmlite"]
"""
SHAPE = {"num_hidden_layers": 2, "hidden_size": 32}
QUANTIZED = "int4"


# Interpreting takes 20 s of a core, and a minute and a half on cores that twelve others share.
@pytest.mark.timeout(300)
def test_mixed_adapters_give_pefts_logits_and_tokens(tmp_path: Path) -> None:
    """More adapters than slots, rows without one, prompts in chunks; with decode steps in padded buffers and without.

    Qwen2 has biases on q, k and v alone. The first case has every other request, because interpreting takes its time;
    the last, of DoRA and the base, is quantized.
    """
    chance = random.Random(2)
    oracle = PeftOracle("qwen2", tmp_path / "given", CONFIGS, shape=SHAPE)
    quantized = PeftOracle(
        "qwen2",
        tmp_path / "quantized",
        CONFIGS,
        shape=SHAPE,
        change=lambda base, at: dequantize_into(base, at, QUANTIZED),
    )
    rows = [*CONFIGS, None, "all"]
    prompts = [chance.choices(range(VOCAB), k=length) for length in (2, 11, 5, 7, 1, 20)]
    asked = list(zip(rows, prompts, strict=True))

    def requests(of: PeftOracle, chosen: slice) -> dict[str, tuple[str | None, NewSequence]]:
        every = enumerate(asked[chosen])
        return {f"{i}: {name}": (name, of.request(f"{i}", prompt, 2, name)) for i, (name, prompt) in every}

    def case(of: PeftOracle, chosen: slice, buffers: bool, **settings: Any) -> dict[str, Any]:
        wanted = {
            key: (request.prompt_ids, request.stopping.max_tokens, request.adapter and request.adapter.directory)
            for key, (_, request) in requests(of, chosen).items()
        }
        return {"model": str(of.directory), "settings": SETTINGS | settings, "requests": wanted, "buffers": buffers}

    parts = [(oracle, slice(1, None, 2)), (oracle, slice(None)), (quantized, slice(3, 5))]
    cases = [
        case(*parts[0], False),
        case(*parts[1], True, ahead=True),
        case(*parts[2], True, ahead=True, quantize=QUANTIZED),
    ]
    results = result_of("cuda_engine_cases.py", "cpu", cases, WITHOUT_NUMBA)
    assert results[0]["padded"] == 0 < min(result["padded"] for result in results[1:])
    for (of, chosen), result in zip(parts, results, strict=True):
        answers = result["answers"]
        for key, (name, request) in requests(of, chosen).items():
            ids, logprobs = answers[key]
            of.check_answer(request, tuple(ids), logprobs, name)
        assert len({tuple(ids) for ids, _ in answers.values()}) == len(answers), "answers are to be diverse"
