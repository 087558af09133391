"""An engine imports no more than it needs: no numba where it computes on CUDA, and never torch's compiler."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

# Imports the engine as if numba were not installed, and loads a model, as worker.engine.process does.
_IMPORT = """
import gc, sys
gc.disable()  # a sixth of the time
sys.modules.update(numba=None, llvmlite=None)
from worker.engine.light_imports import light_imports
with light_imports():
    import worker.engine.build, worker.engine.process, worker.engine.model.runner
    import worker.engine.model.model_layers, worker.engine.lora.adapter_layers
    import worker.engine.encoder.loader, worker.engine.lora.cuda.layers
from worker.engine.model.loader import load_model
load_model(sys.argv[1])
print(*{"torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"} & set(sys.modules))
with light_imports():
    import bench.gpu, tests.gpu.test_engine_on_cuda
print("imported")
"""


def test_an_engine_is_imported_without_numba_and_torchs_compiler(tiny_llama: Any) -> None:
    command = [sys.executable, "-c", _IMPORT, str(tiny_llama.directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "\nimported\n", done.stderr
