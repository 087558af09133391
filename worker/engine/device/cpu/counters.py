"""Counters that a kernel's threads share: 64-bit integers at addresses, for tasks that are taken and waited for."""

# numba compiles these functions from their bytecode, without annotations, so mypy has no types to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker.engine.device.cpu.llvm import I32, I64, int64, kernel_part

# Number of times that a thread looks at a counter before it yields its core: some tens of microseconds.
_SPINS = 20_000


@intrinsic
def fetch_add(typingctx, counter):
    """Atomically increment a counter and return its old value."""

    def generate(context, b, signature, arguments):
        return b.atomic_rmw("add", b.inttoptr(arguments[0], I64.as_pointer()), int64(1), "seq_cst")

    return types.int64(counter), generate


@intrinsic
def _load_counter(typingctx, counter):
    """Atomically load a counter; sequentially consistent, so all writes before its increments are visible."""

    def generate(context, b, signature, arguments):
        return b.load_atomic(b.inttoptr(arguments[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(counter), generate


@intrinsic
def _yield_thread(typingctx):
    """Call POSIX sched_yield: another thread that waits for this core runs first."""

    def generate(context, b, signature, arguments):
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, []), "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@kernel_part()
def wait_for(counter, least):
    """Wait until a counter is `least` or more: a short time, unless the system has taken another thread's core."""
    spins = 0
    while _load_counter(counter) < least:
        spins += 1
        if spins > _SPINS:
            _yield_thread()
