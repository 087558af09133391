"""Linear layers over weights in panels, computed by the CPU kernels. Any thread may call them."""

from __future__ import annotations

import threading
from abc import abstractmethod
from struct import Struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from worker.engine.device.cpu import threads
from worker.engine.device.cpu.workspace import Workspace
from worker.engine.device.dtypes import dtype_name
from worker.engine.linear import fixed_kernel, kernel
from worker.engine.linear.formats import CALL_INTEGERS
from worker.engine.linear.panels import Panels, make_panels
from worker.engine.quantized.weight import AnyLinear

# Maximum rows for which each tile unpacks the codes again, in registers: measured, the others unpack a panel first.
_DIRECT_ROWS = {"float32": 12, "bfloat16": 12, "int8": 8, "int4": 8}
# Tasks per thread that a layer is cut into: no thread waits long for the last one.
_TASKS_PER_THREAD = 8
# Bytes of a cache line.
_LINE = 64


class _Scratch(threading.local):
    """Memory of the kernels' calls, one for each thread that calls: adapters are read while steps run."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        self.counters = np.zeros(max(kernel.COUNTERS, fixed_kernel.COUNTERS), np.int64)
        self.counters_address = self.counters.ctypes.data


_scratch = _Scratch()


def scratch_memory() -> tuple[Tensor, NDArray[np.int64]]:
    """Return this thread's scratch memory, as it is now, and its counters: what the calls before this one refer to."""
    return _scratch.workspace.memory, _scratch.counters


class PanelLayer(nn.Module):
    """A linear layer [..., in_features] to [..., out_features], in one dtype: float32 or bfloat16."""

    # The kernel, those of its parameters that differ from call to call, and the bytes of the others, which stay.
    _kernel: Any
    _call: Struct
    _kept: bytes

    def __init__(self, linear: AnyLinear, dtype: torch.dtype, panels: Panels) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._dtype = dtype
        self._panels = panels
        self._missing = panels.columns - self.in_features
        # The kernels' parameters `columns` to `y_size`: the memory stays where it is.
        self._places = (
            *(panels.columns, panels.segment),
            *(panels.memory.data_ptr(), panels.memory[0].nbytes, panels.count, panels.outputs),
            *panels.scale_places(),
            *(panels.bias.data_ptr(), self.out_features * dtype.itemsize, dtype.itemsize),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight, and add the bias where there is one."""
        # The kernels check nothing: with another dtype or width they would read beyond x.
        assert x.dtype == self._dtype, "the dtype that the kernel is compiled for"
        *sizes, width = x.shape
        assert width == self.in_features, "a row of x has a number for each column"
        y = x.new_empty((*sizes, self.out_features))
        rows = x.numel() // width
        if rows:
            self._multiply(pad(x, (0, self._missing)) if self._missing else x.contiguous(), rows, y)
        return y

    @property
    def input_dtype(self) -> torch.dtype:
        """Return the dtype of `multiply_into`'s inputs."""
        return self._dtype

    @property
    def takes_rows(self) -> bool:
        """Tell whether rows are multiplied as they are; others are padded to whole units of the weight first."""
        return self._panels.columns == self.in_features

    def multiply_into(self, x: Tensor, y: Tensor) -> None:
        """Multiply rows x [rows, in_features] of `input_dtype` into y [rows, out_features], both contiguous.

        Only where `takes_rows`. This is one call of the kernel.
        """
        assert self.takes_rows, "whole units of columns"
        assert x.dtype == self.input_dtype, "the dtype that the kernel is compiled for"
        self._multiply(x, len(x), y)

    @abstractmethod
    def _multiply(self, x: Tensor, rows: int, y: Tensor) -> None:
        """Run the kernel: x [rows, columns] and y [rows, out_features], both contiguous."""

    def _run(self, x: Tensor, rows: int, y: Tensor, scratch: int, *own: int) -> None:
        """Call the kernel in all threads; `own` are the kernel's own parameters of a call."""
        _scratch.counters[:] = 0
        tasks = min(self._panels.count, torch.get_num_threads() * _TASKS_PER_THREAD)
        given = x.data_ptr(), rows, y.data_ptr(), _scratch.counters_address, tasks, scratch
        threads.run_on_all_threads(self._kernel.address, self._call.pack(*given, *own) + self._kept)


class PanelLinear(PanelLayer):
    """A linear layer whose sums are float32."""

    def __init__(self, linear: AnyLinear, dtype: torch.dtype) -> None:
        """Lay out the weight, and compile the kernel for inputs of `dtype`."""
        panels = make_panels(linear)
        super().__init__(linear, dtype, panels)
        self._kernel = kernel.compile_linear(
            panels.format, dtype_name(dtype), scales=panels.scales is not None, zeros=panels.zeros is not None
        )
        self._scratch_floats = kernel.scratch_floats(panels.columns)
        self._call = _struct(CALL_INTEGERS)
        self._kept = _integers(
            *(*self._places, panels.columns * 4),
            *(_DIRECT_ROWS[panels.format], panels.format != "float32", self._scratch_floats * 4),
        )

    @property
    def input_dtype(self) -> torch.dtype:
        """See PanelLayer."""
        return torch.float32

    def _multiply(self, x: Tensor, rows: int, y: Tensor) -> None:
        self._run(x.float(), rows, y, _scratch.workspace.address(torch.get_num_threads() * self._scratch_floats))


class FixedLinear(PanelLayer):
    """A linear layer over codes whose inputs are rounded to 16 bits, see fixed_rows.py."""

    def __init__(self, linear: AnyLinear, dtype: torch.dtype) -> None:
        """Lay out the weight, and compile the kernel for inputs of `dtype`."""
        panels = make_panels(linear, fixed=True)
        super().__init__(linear, dtype, panels)
        self._kernel = fixed_kernel.compile_fixed(panels.format, dtype_name(dtype), zeros=panels.zeros is not None)
        self._call = _struct(fixed_kernel.CALL_INTEGERS)
        segments = -(-panels.columns // panels.segment)
        # The bytes of a row in fixed point, and of its factors and sums.
        self._row_bytes = panels.columns * 2, segments * 8
        self._kept = _integers(
            *(*self._places, panels.columns * dtype.itemsize, *self._row_bytes, segments * 4),
            fixed_kernel.scratch_floats() * 4,
        )

    def _multiply(self, x: Tensor, rows: int, y: Tensor) -> None:
        # Threads write to their scratch all the time: it shares no cache line with other memory.
        before = -(-rows * sum(self._row_bytes) // _LINE) * _LINE
        memory = _scratch.workspace.address(before // 4 + torch.get_num_threads() * fixed_kernel.scratch_floats())
        self._run(x, rows, y, memory + before, memory, fixed_kernel.spread(rows))


def _struct(integers: str) -> Struct:
    return Struct(f"={len(integers.split())}q")


def _integers(*numbers: int) -> bytes:
    return Struct(f"={len(numbers)}q").pack(*numbers)
