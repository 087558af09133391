"""A machine that computes on CUDA needs no numba: what it imports is there without."""

from __future__ import annotations

import subprocess
import sys

# Imports the engine as if numba were not installed.
_IMPORT = """
import gc, sys
gc.disable()  # a sixth of the time
sys.modules.update(numba=None, llvmlite=None)
import worker.engine.build, worker.engine.process, worker.engine.model.runner
import worker.engine.model.model_layers, worker.engine.lora.adapter_layers
import bench.gpu, worker.engine.lora.cuda.layers, tests.gpu.test_engine_on_cuda
print("imported")
"""


def test_the_engine_is_imported_without_it() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n", done.stderr
