"""Packages that processes do not import at their start: each would cost every start time and memory."""

from __future__ import annotations

import subprocess
import sys

# Imported where they are needed: models, grammars, traces and templates that a process may never see.
LATE = {"httpx2", "huggingface_hub", "jinja2", "llguidance", "numpy", "obstore", "opentelemetry", "rich", "tokenizers"}
LATE |= {"cryptography.x509", "torch", "transformers"}
MODULES = (
    "router.__main__",
    "router.app",
    "worker.__main__",
    "worker.io.app",
    "worker.engine.process",
    "adapter_store.__main__",
)
PROCESSES = ", ".join(f"loraplex.{module}" for module in MODULES)


def test_processes_start_without_heavy_packages() -> None:
    code = f"import sys, {PROCESSES}; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not LATE & set(modules)
