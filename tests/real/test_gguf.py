"""The real model's GGUF file: what its import writes answers as transformers does that loads the file itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.real import fetch_gguf
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine.torch_engine import build_engine
from loraplex.worker.engine_api import EngineConfig, NewSequence
from tests.real.conftest import WHOLE
from tests.real.test_chats import MARGIN, chats
from tests.worker.conftest import run_until_idle

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not WHOLE, reason="transformers takes 20 s for the file; `make real` waits for it"),
]
PROMPTS, TOKENS = 50, 32
# Maximum bytes that an import takes beyond the size of its file.
MEMORY = 1_000_000_000
MEASURE = """
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "loraplex.worker", "import-gguf", *sys.argv[1:]], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file's directory in float32, whose import has taken no more memory than it may."""
    file, directory = fetch_gguf(), tmp_path_factory.mktemp("gguf") / "imported"
    flags = [f"--file={file}", f"--out={directory}", "--dtype=float32"]
    # By a small process: what this one has in memory would count as its child's.
    done = subprocess.run([sys.executable, "-c", MEASURE, *flags], stdout=subprocess.PIPE, text=True, check=True)
    peak = int(done.stdout.split()[-1]) * 1024
    print(f"the import of {file.stat().st_size:,} bytes took {peak:,} bytes of memory")
    assert peak <= file.stat().st_size + MEMORY
    return directory


@pytest.fixture(scope="module")
def own() -> Any:
    """The model as transformers loads it of the file, in float32."""
    file, auto = fetch_gguf(), AutoModelForCausalLM
    loading: Any = auto.from_pretrained
    return loading(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def test_tensors_and_tokenizer_are_transformers_own(imported: Path, own: Any) -> None:
    tensors, expected = load_file(imported / "model.safetensors"), own.state_dict()
    assert expected.keys() - tensors.keys() == {"lm_head.weight"}  # the embeddings' own
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    file = fetch_gguf()
    read = AutoTokenizer.from_pretrained(imported), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for chat in chats(PROMPTS):
        first, second = (tokenizer.apply_chat_template(chat, add_generation_prompt=True) for tokenizer in read)
        assert first == second


def undecided(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> int:
    """Check that each id is the model's best after those before it; count those that no margin decides."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *ids[:-1]]])).logits[0, len(prompt) - 1 :]
    best = logits.topk(2)
    close = best.values[:, 0] - best.values[:, 1] < MARGIN
    assert not ((best.indices[:, 0] != torch.tensor(list(ids))) & ~close).any()
    return sum(close.tolist())


def test_greedy_answers_are_transformers_own(imported: Path, own: Any, one_thread: None) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(imported)
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats(PROMPTS)
    ]
    engine = build_engine(EngineConfig(str(imported), dtype="float32", rows=16, kv_blocks=512))
    try:
        stopping = StoppingParams(max_tokens=TOKENS)
        asked = [NewSequence(str(number), tuple(ids), stopping=stopping) for number, ids in enumerate(prompts)]
        outputs = run_until_idle(engine, {0: asked})
    finally:
        engine.close()
    answers = [[token for output in outputs[str(number)] for token in output.token_ids] for number in range(PROMPTS)]
    close = sum(undecided(own, prompt, ids) for prompt, ids in zip(prompts, answers, strict=True))
    tokens = sum(map(len, answers))
    print(f"{PROMPTS} prompts, {tokens} tokens, {close} of them undecided")
    assert close <= tokens // 100
    ended = [ids for ids in answers if ids[-1] == own.config.eos_token_id]
    assert ended
    assert all(len(ids) == TOKENS for ids in answers if ids not in ended)
