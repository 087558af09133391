"""The memory of each rank, after it has loaded its part: python -m tests.worker.engine.ranks.memory

Makes a model of 0.5 GB and prints, for 1, 2 and 4 ranks and each scheme, the largest rank's share of what one process
takes, both without what a model of hardly any weights takes; ends with 1 where that is more than 0.6 or 0.35.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCHEMES = ("", "int8")
MOST = {1: 1.0, 2: 0.6, 4: 0.35}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2000, "hidden_size": 1024,
    "intermediate_size": 4096, "num_hidden_layers": 7, "num_attention_heads": 16, "num_key_value_heads": 4,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def own_bytes(pid: int | str = "self") -> int:
    """The bytes of a process that no file backs."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def measure(directory: str, ranks: int, scheme: str) -> list[int]:
    """The bytes of each rank's part."""
    from loraplex.worker.engine.torch_engine import build_engine
    from loraplex.worker.engine_api import EngineConfig

    before = own_bytes()
    config = EngineConfig(
        directory, dtype="float32", kv_blocks=16, rows=1, threads=1, quantize=scheme, tensor_parallel=ranks
    )
    engine = build_engine(config)
    pids: list[int | str] = ["self", *(engine._followers.pids if engine._followers else [])]
    taken = [own_bytes(pid) - before for pid in pids]
    engine.close()
    return taken


def main() -> int:
    """Measure each in a process of its own."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
        return 0
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    few = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 100}
    worst = 0
    with tempfile.TemporaryDirectory() as directory:
        for name, sizes in (("small", few), ("large", {})):
            config = AutoConfig.for_model(**CONFIG | sizes)
            auto.from_config(config).save_pretrained(f"{directory}/{name}")
        for scheme in SCHEMES:
            whole = 0
            for ranks, most in MOST.items():
                small, large = (_measured(f"{directory}/{name}", ranks, scheme) for name in ("small", "large"))
                taken = max(large) - max(small)
                whole = whole or taken
                worst |= taken > most * whole
                print(f"{scheme or 'float32'}, {ranks} ranks: {taken / whole:.2f} of {whole >> 20} MiB", flush=True)
    return int(worst)


def _measured(directory: str, ranks: int, scheme: str) -> list[int]:
    command = [sys.executable, "-m", "tests.worker.engine.ranks.memory", directory, str(ranks), scheme]
    taken: list[int] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return taken


if __name__ == "__main__":
    sys.exit(main())
