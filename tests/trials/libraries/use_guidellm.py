"""Scenarios for the command of guidellm: benchmarks of completions and of chats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.trials.libraries.scenarios import MODEL, QUESTION, URL, run

_REQUESTS = 3


def completions() -> None:
    """Measure answers to prompts."""
    _measure("/v1/completions")


def chat() -> None:
    """Measure answers to chats."""
    _measure("/v1/chat/completions")


def _measure(path: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prompts, report = Path(folder) / "prompts.jsonl", Path(folder) / "report.json"
        prompts.write_text((json.dumps({"prompt": QUESTION, "output_tokens_count": 4}) + "\n") * _REQUESTS)
        command = [
            Path(sys.executable).with_name("guidellm"), "run", "--disable-progress",
            "--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={path}",
            "--profile", "kind=concurrent,streams=1", "--constraint", f"kind=max_requests,count={_REQUESTS}",
            "--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={report}",
        ]  # fmt: skip
        environ = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}/cache"}
        subprocess.run([str(word) for word in command], cwd=folder, env=environ, stdout=sys.stderr, check=True)
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == _REQUESTS, totals


if __name__ == "__main__":
    run(completions, chat)
