"""Peak memory of a process that loads a model and computes a prompt: `python -m bench.peak_memory MODEL SCHEME TOKENS`.

Prints JSON: the largest resident sets, in bytes, that the system has seen when the libraries were imported, the engine
was built, and the prompt was computed. The KV cache has room for the prompt alone.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report import progress
from loraplex.contracts.options import StoppingParams
from loraplex.runtime.interpreter import hide_module
from loraplex.worker.engine_api import EngineConfig, NewSequence

if TYPE_CHECKING:
    from bench.models import ModelShape

_BLOCK = 16
_MB = 1e6


@dataclass(frozen=True)
class PeakMemory:
    """The peak memory of a process in bytes after its imports, with the engine built, and with a prompt computed.

    `kv` are the bytes of the KV cache, `weights` those of the model, once.
    """

    imported: int
    built: int
    served: int
    kv: int
    weights: int

    @property
    def over_weights_mb(self) -> float:
        """Return the MB at the peak beyond the weights and the KV cache."""
        return (self.served - self.weights - self.kv) / _MB

    def rows(self, form: str) -> list[Mapping[str, Any]]:
        """Return the rows of a report."""
        peaks = {"libraries alone": self.imported, "engine built": self.built, "prompt computed": self.served}
        return [
            {"case": f"peak memory, {form}, {when}", "unit": "MB", "median": peak / _MB} for when, peak in peaks.items()
        ]


def peak_memory(shape: ModelShape, model: Path, quantize: str, tokens: int) -> PeakMemory:
    """Measure the peak memory of a process of its own with a prompt of so many tokens."""
    progress(f"peak memory with a prompt of {tokens} tokens, {quantize or 'auto'}")
    argv = [sys.executable, "-m", "bench.peak_memory", str(model), quantize, str(tokens)]
    ended = subprocess.run(argv, stdout=subprocess.PIPE, check=True)
    weights = (1 if quantize else 2) * shape.linear_parameters + 2 * (shape.parameters - shape.linear_parameters)
    # Keys and values in bfloat16.
    kv = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim * tokens
    return PeakMemory(**json.loads(ended.stdout), kv=kv, weights=weights)


def main() -> None:
    """Build the engine, compute a random prompt, print the peaks."""
    model, quantize, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    hide_module("triton")  # as the engine process does on the CPU
    import loraplex.worker.engine.decoder.cpu  # noqa: F401  # the engine imports it with the first model
    from loraplex.worker.engine.torch_engine import build_engine

    imported, blocks = _peak_bytes(), -(-(tokens + 1) // _BLOCK)
    config = EngineConfig(model, rows=1, kv_blocks=blocks, block_size=_BLOCK, quantize=quantize)
    with closing(build_engine(config)) as engine:
        built, chance = _peak_bytes(), random.Random(0)
        ids = tuple(chance.randrange(5, engine.limits.vocab_size) for _ in range(tokens))
        engine.add_sequence(NewSequence("prompt", ids, stopping=StoppingParams(1)))
        while engine.has_work():
            engine.step()
    print(json.dumps({"imported": imported, "built": built, "served": _peak_bytes()}))


def _peak_bytes() -> int:
    """Return the largest resident set of this process so far."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, "Linux says so"
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
