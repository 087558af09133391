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


def test_an_engine_on_the_cpu_does_not_load_triton() -> None:
    """Which torch imports where it is installed; its library takes 72 MB."""
    code = """
import socket
import sys
from loraplex.worker.engine import process
from loraplex.worker.engine_api import EngineConfig, ModelUnusableError
try:
    process._build(EngineConfig("nowhere", "cpu"), process.EngineEnd(socket.socketpair()[0]))
except ModelUnusableError:
    print([name for name, module in sys.modules.items() if name.partition(".")[0] == "triton" and module])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
