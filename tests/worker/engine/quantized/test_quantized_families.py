"""Quantized models against transformers and peft in float32 on the dequantized numbers, token for token.

Every family here with an adapter on all its layers in the mixed batch, in so few blocks that sequences are preempted,
with chunked prefill beside decodes; then the same requests as another engine gets them after a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.worker.engine.model.tiny_families import (
    CRAMPED,
    LAST_ARRIVAL,
    NEW_TOKENS,
    make_config,
    make_model,
    requests_of,
    with_adapter,
)
from tests.worker.engine.peft_oracle import PeftOracle
from tests.worker.engine.quantized.dequantized import dequantize_into, quantize_keys_and_values

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

# Each family once, each scheme several times. Rows of 32 and 48 columns: groups of 32 end with a shorter one.
CASES = {
    "llama": "int8", "qwen2": "int4-128", "gemma2": "int8-zero-point", "gemma3_text": "int4-64+embeddings",
    "gpt2": "int4", "gpt_neox": "int8-zero-point", "opt": "int4-64", "phi3": "int4", "mixtral": "int4",
    "deepseek_v3": "int8", "cohere": "int8+embeddings", "starcoder2": "int8-zero-point+embeddings", "gpt_oss": "",
}  # fmt: skip
# Families of whose forms others stand in `make test`.
AT_NIGHT = {"llama", "gemma2", "gpt2", "gpt_neox", "opt", "phi3", "cohere"}
# Those with a KV cache of int8 as well, or alone: windows, softcaps, sinks, values narrower than keys. A number that
# lies between two codes may get either, which in models as narrow as these changes logits by about a hundredth.
KV_INT8 = {"llama", "qwen2", "gemma2", "gemma3_text", "deepseek_v3", "starcoder2", "gpt_oss"}
KV_MARGIN = 1e-2
# The tokens of an answer that a crashed engine gave.
GIVEN = 5


@pytest.mark.parametrize(
    ("model_type", "scheme"),
    [pytest.param(*case, marks=[pytest.mark.nightly] if case[0] in AT_NIGHT else []) for case in CASES.items()],
)
def test_a_quantized_family_answers_as_its_dequantized_weights(
    model_type: str,
    scheme: str,
    tmp_path: Path,
    save_adapter: Callable[..., None],
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(make_config(model_type), tmp_path / "model")
    counts: list[int] = []
    int8 = model_type in KV_INT8
    if int8:
        quantize_keys_and_values(model, monkeypatch)
    tiny = with_adapter(
        model,
        model_type,
        tmp_path,
        save_adapter,
        lambda base: counts.append(dequantize_into(base, tmp_path / "model", scheme)),
        KV_MARGIN if int8 else 1e-5,
    )
    assert counts[0] >= (8 if scheme else 0)
    assert len({token for ids in tiny.answers for token in ids}) >= 10, "answers are to be diverse"
    requests = requests_of(tiny)
    chosen = {"quantize": scheme, "kv_cache_dtype": "int8" if int8 else "", **CRAMPED}
    outputs = run_until_idle(make_engine(tiny.directory, **chosen), {0: requests[:3], LAST_ARRIVAL: requests[3:]})
    answers = {name: tuple(token for output in some for token in output.token_ids) for name, some in outputs.items()}
    assert answers == {str(index): ids for index, ids in enumerate(tiny.answers)}

    again = [replace(request, emitted_ids=ids[:GIVEN]) for request, ids in zip(requests, tiny.answers, strict=True)]
    outputs = run_until_idle(make_engine(tiny.directory, **chosen), {0: again})
    rest = {name: tuple(token for output in some for token in output.token_ids) for name, some in outputs.items()}
    assert rest == {str(index): ids[GIVEN:NEW_TOKENS] for index, ids in enumerate(tiny.answers)}


ENDS = ["embed_tokens", "lm_head"]
KINDS: dict[str, dict[str, Any]] = {
    "all-linear": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "DoRA": {"r": 8, "lora_alpha": 16, "use_dora": True, "target_modules": "all-linear"},
    "both ends": {"r": 3, "lora_alpha": 8, "target_modules": [*ENDS, "up_proj"]},
    "DoRA of both ends": {"r": 4, "lora_alpha": 6, "use_dora": True, "target_modules": [*ENDS, "k_proj"]},
}


TIED = {"tie_word_embeddings": True}
TRAINED: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": [3, 9, 4]}
TRAINED_ENDS = {"trainable_token_indices": {"embed_tokens": [2, 9], "lm_head": [4, 9, 1]}}


@pytest.mark.parametrize(
    ("model_type", "scheme", "shape", "kinds"),
    [
        ("llama", "int8", {}, KINDS),
        ("llama", "int4+embeddings", {}, KINDS),
        ("qwen2", "int8-zero-point+embeddings", TIED, KINDS),
        ("llama", "int8", {}, {"a few": TRAINED}),
        ("llama", "int4+embeddings", {}, {"both ends": TRAINED | TRAINED_ENDS}),
        ("qwen2", "int8-zero-point+embeddings", TIED, {"a few": TRAINED}),
    ],
)
def test_every_kind_of_adapter_on_quantized_weights_is_pefts(
    model_type: str,
    scheme: str,
    shape: dict[str, Any],
    kinds: dict[str, dict[str, Any]],
    tmp_path: Path,
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
) -> None:
    """Logits to 1e-4, and greedy ids. DoRA needs the norms of the dequantized rows, trained tokens the rows."""
    oracle = PeftOracle(
        model_type,
        tmp_path,
        kinds,
        shape=shape,
        change=lambda model, directory: dequantize_into(model, directory, scheme),
    )
    engine = make_engine(
        oracle.directory,
        quantize=scheme,
        rows=6,
        kv_blocks=200,
        block_size=4,
        adapter_slots=4,
        max_rank=8,
        step_tokens=24,
    )
    requests = {name: oracle.request(name, (3, 1, 4, 1, 5, 9, 2, 6), 10, name) for name in kinds}
    requests["base"] = oracle.request("base", (2, 7, 1, 8), 10)
    outputs = run_until_idle(engine, {0: list(requests.values())})
    answers = {
        oracle.check(request, outputs[name], name if name in kinds else None) for name, request in requests.items()
    }
    assert len(answers) == len(requests)
