"""The engine's device: transfers that do not wait for it, free memory, lack of memory, the cores of torch's operators.

A copy from pageable host memory waits for all work queued on the device. A step's copies go through pinned memory of
torch's caching host allocator, which reuses a block only after the copies from it are done: values of one step are
never overwritten while the device still reads them, however far ahead the host is. All copies, and all kernels that
read them, are on the current stream of the thread that runs steps, so they happen in the order of the calls; a buffer
at a fixed address (worker.engine.model.runner.DecodeBuffers) is overwritten after the step before has read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from loraplex.worker.sizing import available_cores, available_host_bytes

# Share of the available host memory that adapters of all of a machine's workers may take by default: one part in this
# many. There is a worker for each CUDA device.
_HOST_ADAPTER_SHARE = 8


def available_bytes(device: torch.device) -> int:
    """Return how many bytes may still be taken on the device; on the CPU inside the limit of the control group."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_bytes()


def host_adapter_bytes(chosen: int, device: torch.device) -> int:
    """Return how many bytes adapters may take in host memory; `chosen`: 0, or so many."""
    workers = torch.cuda.device_count() if device.type == "cuda" else 1
    return chosen or available_host_bytes() // (_HOST_ADAPTER_SHARE * workers)


# Number of staging buffers, and bytes of one: while one is filled, the others are on their way.
_STAGING_BUFFERS, _STAGING_BYTES = 3, 8 << 20


class Staging:
    """Pinned memory of a fixed size, through which large copies reach a device beside the steps.

        host memory │ part 0 │ part 1 │ part 2 │ ...      part i goes through buffer i % 3, on a stream of its own

    Pinning a large copy's own memory would stop the device for milliseconds, and torch keeps pinned blocks for good,
    rounded up to powers of two. Any thread; one copy at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [
            torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_STAGING_BUFFERS)
        ]
        # Of each buffer: the copy from it is done. `blocking`: a thread that waits sleeps, it does not spin.
        self._free = [torch.cuda.Event(blocking=True) for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def copy(self, memory: Tensor) -> Tensor:
        """Return a copy of contiguous host memory on the device, when it is complete there."""
        source = memory.view(torch.uint8)
        with self._lock, torch.cuda.stream(self._stream):
            target = torch.empty(len(source), dtype=torch.uint8, device=self._device)
            parts = zip(torch.split(source, _STAGING_BYTES), torch.split(target, _STAGING_BYTES), strict=True)
            for index, (part, place) in enumerate(parts):
                buffer, free = self._buffers[index % _STAGING_BUFFERS], self._free[index % _STAGING_BUFFERS]
                free.synchronize()
                place.copy_(buffer[: len(part)].copy_(part), non_blocking=True)
                free.record(self._stream)
            for free in self._free:
                free.synchronize()
        return target.view(memory.dtype)


def return_freed_memory() -> None:
    """Return freed memory of this process to the system, after much was freed: glibc keeps it otherwise."""
    # Other C libraries have no such function.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# Parts of the messages of torch's CPU allocator, CUDA, cuBLAS and Triton.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether the error means out of memory; torch's CPU allocator has no exception class for it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY)


# Number of threads that torch uses by default; read at import, since an engine that was built earlier may set fewer.
_CORES = torch.get_num_threads()
# Maximum number of parameters of a model that computes on one thread by default. With 5 M parameters one thread made
# 250 tokens/s and two threads 27 on a busy machine, because each waits for the other; with 28 M two are twice as fast.
_ONE_CORE_PARAMETERS = 16_000_000


def step_threads(parameters: int, threads: int) -> int:
    """Return the number of threads that compute steps of a model with so many parameters; `threads`: 0, or chosen."""
    return threads or (1 if parameters < _ONE_CORE_PARAMETERS else available_cores(_CORES))


def keep_to_one_core() -> None:
    """Limit torch operators in the calling thread to one core. For threads beside the one that runs steps.

    With more OpenMP threads in the process than cores, libgomp's threads no longer spin while they wait, and every
    operator of every step takes some 50 us longer. torch.set_num_threads sets the number for the calling thread and for
    threads that have not read it yet, so the thread that runs steps sets its own afterwards; get_num_threads makes the
    setting permanent for the calling thread.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()


def prepare_loader(device: torch.device) -> None:
    """Prepare a thread beside the one that runs steps, which brings adapters to the device.

    Each thread has a current CUDA device of its own, at first device 0: pinned memory, and whatever else names no
    device, would take a context on it, which is hundreds of megabytes.
    """
    keep_to_one_core()
    make_current(device)


def make_current(device: torch.device) -> None:
    """Make a CUDA device the thread's current one: Triton launches there, wherever a kernel's tensors are."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy (nested) lists of numbers, or a numpy array that must not change afterwards, to the device."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def download(values: Tensor) -> Tensor:
    """Return a host copy of the values, complete once the stream has reached this call: see record_event."""
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that completes when all work queued so far is done; None on the CPU, where it is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def before_compilations(call: Callable[[], None]) -> None:
    """Call before each of Triton's compilations, which keep the launching thread for up to two seconds each."""
    from triton import knobs  # Triton is there only with CUDA

    def hook(**_: Any) -> None:  # what it returns would say that another compiles
        call()

    knobs.runtime.jit_cache_hook = hook


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel launch: `arguments` and compile-time `constants` by parameter name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int
    stages: int

    def launch(self) -> None:
        """Queue the launch on the current stream."""
        self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages)
