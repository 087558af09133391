"""Zero-point int8 of every weight, by hand: the memory, the error, and a text before and after.

    python -m examples.quantized                  the shipped model
    python -m examples.quantized DIR              another transformers model

Each tensor becomes bytes over the range of its numbers, from its lowest to its highest:

    scale = (highest - lowest) / 255        zero = round(-lowest / scale)
    code = round(weight / scale) + zero     weight ≈ (code - zero) * scale

This is the experiment of textbooks: one scale for a whole tensor, norms and embeddings included. The cluster's own
`--quantize int8-zero-point` has a scale and a zero point for each output of a layer, and computes with the bytes:
`loraplex quantize --report` compares it in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

MODEL = Path(__file__).parent / "model"
PROMPT = "Return a list of"
TOKENS = 40
# Bytes of a tensor's scale and zero point.
_SCALE_BYTES = 8


@dataclass(frozen=True)
class Quantized:
    """A tensor as bytes, with the scale and the zero point of all of them."""

    codes: Tensor
    scale: float
    zero: int

    @property
    def bytes(self) -> int:
        """Return the memory that it takes."""
        return self.codes.nbytes + _SCALE_BYTES


def quantize(weight: Tensor) -> Quantized:
    """Round a tensor to 256 steps between its lowest and its highest number."""
    lowest, highest = float(weight.min()), float(weight.max())
    scale = (highest - lowest) / 255 or abs(lowest) or 1.0  # all numbers may be the same
    zero = round(-lowest / scale)
    return Quantized((weight / scale + zero).round().clamp(0, 255).to(torch.uint8), scale, zero)


def dequantize(quantized: Quantized) -> Tensor:
    """Return the numbers that the bytes stand for."""
    return (quantized.codes.float() - quantized.zero) * quantized.scale


def run(directory: Path = MODEL) -> dict[str, Any]:
    """Return bytes and texts before and after, the largest error by tensor, and the mean error of all weights."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    parameters: Mapping[str, Tensor] = dict(model.named_parameters())
    before = _continue(model, tokenizer)
    codes = {name: quantize(weight.detach()) for name, weight in parameters.items()}
    errors, total = {}, 0.0
    for name, weight in parameters.items():
        restored = dequantize(codes[name])
        error = (restored - weight.detach()).abs()
        errors[name] = float(error.max())
        total += float(error.sum())
        weight.data.copy_(restored)
    return {
        "bytes": (sum(weight.nbytes for weight in parameters.values()), sum(each.bytes for each in codes.values())),
        "errors": errors,
        "mean_error": total / sum(weight.numel() for weight in parameters.values()),
        "texts": (before, _continue(model, tokenizer)),
    }


def _continue(model: Any, tokenizer: Any) -> str:
    ids = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        answer = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False)
    text: str = tokenizer.decode(answer[0], skip_special_tokens=True)
    return text


if __name__ == "__main__":
    results = run(Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL)
    whole, small = results["bytes"]
    print(f"memory  {whole / 1e6:.1f} MB in float32, {small / 1e6:.1f} MB in bytes")
    worst = max(results["errors"], key=results["errors"].__getitem__)
    print(f"error   mean {results['mean_error']:.5f}, largest {results['errors'][worst]:.5f}, in {worst}")
    for when, text in zip(("before", "after"), results["texts"], strict=True):
        print(f"{when:7} {text!r}")
