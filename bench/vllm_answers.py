"""vLLM's side of bench.vllm_peer, run by its own Python.

    python vllm_answers.py MODEL ROWS DTYPE CONTEXT SPECULATIVE_CONFIG ADAPTER...

Reads a JSON line {"prompts", "tokens", "adapters", "schemas", "salt", "ends"} for each run and answers {"tokens",
"seconds"}, until its input ends. Runs with another salt share no prefix; with `ends` answers end where the model says.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Rank of adapters, the same for all.
_RANK = 16


def main() -> None:
    """Load the model, then answer run after run. The first line says that the model is ready."""
    # vLLM prints to stdout: that goes to stderr, so that only answers are on stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    directory, rows, dtype, context, speculative, *adapters = sys.argv[1:]
    vllm: Any = importlib.import_module("vllm")
    has_tokenizer = (Path(directory) / "tokenizer.json").exists()
    lora = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": _RANK} if adapters else {}
    model = vllm.LLM(
        directory,
        dtype=dtype,
        max_num_seqs=int(rows),
        max_model_len=int(context),
        disable_log_stats=True,
        skip_tokenizer_init=not has_tokenizer,
        speculative_config=json.loads(speculative),
        **lora,
    )
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(vllm, model, json.loads(line), adapters, has_tokenizer)), file=answers, flush=True)


def _run(vllm: Any, model: Any, asked: dict[str, Any], adapters: list[str], has_tokenizer: bool) -> dict[str, float]:
    structured: Any = importlib.import_module("vllm.sampling_params").StructuredOutputsParams
    salt = {"cache_salt": asked["salt"]} if asked["salt"] else {}
    prompts = [{"prompt_token_ids": prompt} | salt for prompt in asked["prompts"]]
    parameters = [
        vllm.SamplingParams(
            temperature=0,
            max_tokens=tokens,
            detokenize=has_tokenizer,
            ignore_eos=schema is None and not asked["ends"],
            structured_outputs=None if schema is None else structured(json=schema),
        )
        for schema, tokens in zip(asked["schemas"], asked["tokens"], strict=True)
    ]
    lora = _lora_requests(asked["adapters"], adapters) if adapters else None
    start = time.perf_counter()
    outputs = model.generate(prompts, parameters, use_tqdm=False, lora_request=lora)
    seconds = time.perf_counter() - start
    return {"tokens": sum(len(output.outputs[0].token_ids) for output in outputs), "seconds": seconds}


def _lora_requests(chosen: list[int | None], adapters: list[str]) -> list[Any]:
    request: Any = importlib.import_module("vllm.lora.request").LoRARequest
    return [None if index is None else request(f"a{index}", index + 1, adapters[index]) for index in chosen]


if __name__ == "__main__":
    main()
