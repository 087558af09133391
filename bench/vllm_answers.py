"""vLLM's side of bench.vllm_peer, run by the Python of its own folder: `python vllm_answers.py MODEL ROWS DTYPE`.

Reads a JSON line {"prompts", "tokens", "schemas"} for each run and answers {"tokens", "seconds"}, until its input ends.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

# Maximum tokens of a sequence, as in the recipe; a larger context takes more memory.
_CONTEXT = 1024


def main() -> None:
    """Load the model, then answer run after run. The first line says that the model is ready."""
    # vLLM prints to stdout: that goes to stderr, so that only answers are on stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    directory, rows, dtype = sys.argv[1:]
    vllm: Any = importlib.import_module("vllm")
    model = vllm.LLM(directory, dtype=dtype, max_num_seqs=int(rows), max_model_len=_CONTEXT, disable_log_stats=True)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(vllm, model, json.loads(line))), file=answers, flush=True)


def _run(vllm: Any, model: Any, asked: dict[str, Any]) -> dict[str, float]:
    structured: Any = importlib.import_module("vllm.sampling_params").StructuredOutputsParams
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    parameters = [
        vllm.SamplingParams(
            temperature=0,
            max_tokens=asked["tokens"],
            detokenize=True,
            ignore_eos=schema is None,
            structured_outputs=None if schema is None else structured(json=schema),
        )
        for schema in asked["schemas"]
    ]
    start = time.perf_counter()
    outputs = model.generate(prompts, parameters, use_tqdm=False)
    seconds = time.perf_counter() - start
    return {"tokens": sum(len(output.outputs[0].token_ids) for output in outputs), "seconds": seconds}


if __name__ == "__main__":
    main()
