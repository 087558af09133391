"""The report of a quantized model: its size, the error of its weights, and what that does to a text.

perplexity and divergence   over the text, in windows of the context, each from an empty context on
before and after            greedy continuations of the text's beginning
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from artifacts import ArtifactError
from artifacts.checkpoint import read_checkpoint
from worker.engine.evaluation.differences import Differences
from worker.engine.evaluation.logits import EvaluatedModel, Ids
from worker.engine.evaluation.pair import ModelPair, TextCodec, load_pair
from worker.engine.evaluation.weight_error import weight_bytes, weight_errors

# Maximum tokens of a window of the text, and of the text that is read: more take long and change the figures little.
_WINDOW_TOKENS, _TEXT_TOKENS = 512, 16_384
# Tokens of the text's beginning that are continued, and of the continuation.
_PROMPT_TOKENS, _ANSWER_TOKENS = 16, 48


def quantization_report(
    model: str, quantized: str, text: str, device: str = "cpu", kv_cache_dtype: str = ""
) -> dict[str, Any]:
    """Compare a model with its quantized form, which alone has a KV cache of `kv_cache_dtype`.

    Raises ArtifactError, ModelUnusableError.
    """
    codec = TextCodec(Path(model))
    ids = _read_text(Path(text), codec)
    pair = load_pair(model, quantized, device)
    window = min(_WINDOW_TOKENS, pair.original.context_length)
    figures = _sizes(model, pair, kv_cache_dtype)
    tokens = max(window, _PROMPT_TOKENS + _ANSWER_TOKENS)
    original = EvaluatedModel(pair.original, rows=1, tokens=tokens)
    other = EvaluatedModel(pair.quantized, rows=1, tokens=tokens, kv_cache_dtype=kv_cache_dtype)
    differences = compare_text(original, other, ids, window)
    before, after = differences.perplexities
    prompt = ids[:_PROMPT_TOKENS]
    ends = pair.original.end_token_ids
    answers = [each.answers([prompt], _ANSWER_TOKENS, greedy, ends)[0] for each in (original, other)]
    return figures | {
        "text": {
            "tokens": differences.tokens,
            "perplexity": {"original": before, "quantized": after},
            "agreement": differences.agreement,
            "mean_kl": differences.mean_kl,
            "max_kl": differences.max_kl,
        },
        "continuation": {
            "prompt": codec.decode(prompt),
            "original": codec.decode(answers[0]),
            "quantized": codec.decode(answers[1]),
        },
    }


def compare_text(original: EvaluatedModel, quantized: EvaluatedModel, ids: Ids, window: int) -> Differences:
    """Compare the models' next tokens over a text, window by window."""
    differences = Differences()
    for start in range(0, len(ids) - 1, window):
        part = ids[start : start + window + 1]
        following = torch.tensor(part[1:])
        compared = 0
        for own, other in zip(original.logits(part[:-1]), quantized.logits(part[:-1]), strict=True):
            differences.add(own, other, following[compared : compared + len(own)])
            compared += len(own)
    return differences


def greedy(logits: Tensor) -> Tensor:
    """Return the best token of each row of logits."""
    return logits.argmax(-1)


def _read_text(path: Path, codec: TextCodec) -> Ids:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(str(path), f"cannot be read as UTF-8 text: {error}") from error
    ids = codec.encode(text)[:_TEXT_TOKENS]
    if len(ids) < 2:
        raise ArtifactError(str(path), "has less than two tokens, so that there is nothing to predict")
    return ids


def _sizes(model: str, pair: ModelPair, kv_cache_dtype: str) -> dict[str, Any]:
    stored = [tensor for _, tensor in read_checkpoint(Path(model)).tensors.values()]
    number_bytes = {"F32": 4, "BF16": 2, "F16": 2}.get(stored[0].dtype, 4)
    return {
        "weight_bytes": {
            "original": weight_bytes(pair.original.module, number_bytes),
            "quantized": weight_bytes(pair.quantized.module, number_bytes),
        },
        "kv_bytes_per_token": {
            "original": pair.original.kv.token_bytes(number_bytes, ""),
            "quantized": pair.quantized.kv.token_bytes(number_bytes, kv_cache_dtype),
        },
        "weight_errors": [
            {
                "kind": error.kind,
                "layers": error.layers,
                "weights": error.weights,
                "max": error.max_error,
                "mean": error.mean_error,
                "relative": error.relative_error,
            }
            for error in weight_errors(pair.original.module, pair.quantized.module)
        ],
    }
