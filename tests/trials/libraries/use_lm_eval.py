"""Scenarios for the command of lm-evaluation-harness: log probabilities and answers, of completions and of chats."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.trials.libraries.scenarios import MODEL, QUESTION, URL, run

_TASKS = Path(__file__).parents[1] / "evaluate/tasks"
_CHOICES = ("positive", "negative", "neutral")


def completions() -> None:
    """Score choices and a text by log probabilities, and get an answer; the gateway tokenizes."""
    samples = _samples("completions", ("sentiment", "reviews", "triage"), "tokenizer_backend=remote")
    for responses in samples["sentiment"]:
        chances = [math.exp(float(logprob)) for logprob, _ in responses]
        assert len(set(chances)) == len(_CHOICES), responses
        assert 0 < sum(chances) <= 1.001, responses
    (texts,) = {tuple(responses) for responses in samples["reviews"]}  # of the same text
    assert all(float(text) < 0 for text in texts), texts
    assert all(responses[0] for responses in samples["triage"]), samples


def chat() -> None:
    """Get answers to chats."""
    samples = _samples("chat-completions", ("triage",), "tokenizer_backend=None", "--apply_chat_template")
    assert all(responses[0] for responses in samples["triage"]), samples


def _samples(backend: str, tasks: Sequence[str], arguments: str, *flags: str) -> dict[str, list[Any]]:
    """Return the responses to each task's questions by a backend."""
    with tempfile.TemporaryDirectory() as folder:
        lines = "".join(json.dumps({"text": f"{QUESTION} It is", "answer": answer}) + "\n" for answer in _CHOICES[:2])
        for name in ("sentiment", "triage"):
            (Path(folder) / f"{name}.jsonl").write_text(lines)
        path = f"{URL}/v1/{backend.replace('-', '/')}"
        command = [
            Path(sys.executable).with_name("lm_eval"), "run", "--model", f"local-{backend}", "--tasks", *tasks,
            "--model_args", f"model={MODEL},base_url={path},num_concurrent=2,{arguments}", *flags,
            "--include_path", _TASKS, "--log_samples", "--output_path", folder,
        ]  # fmt: skip
        environ = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}/cache"}
        subprocess.run([str(word) for word in command], cwd=folder, env=environ, stdout=sys.stderr, check=True)
        return {
            task: [json.loads(line)["filtered_resps"] for line in file.read_text().splitlines()]
            for task in tasks
            for file in Path(folder).rglob(f"samples_{task}_*.jsonl")
        }


if __name__ == "__main__":
    run(completions, chat)
