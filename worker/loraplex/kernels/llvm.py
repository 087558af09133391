"""LLVM vector instructions for numba kernels: numba does not vectorize loops over raw addresses.

Functions with an argument `b` emit instructions with that llvmlite IRBuilder. Those marked @emits() are called from
compiled code. A kernel's compile-time constants are in the type of its parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.registry import cpu_target
from numba.extending import intrinsic

# numba's own code has no instruction in assembly; that of kernels has those that llvmlite's IR cannot express.
binding.initialize_native_asmparser()

# Codes of the dtypes that kernels are compiled for.
KINDS = {"float32": 1, "bfloat16": 2, "float16": 3, "int8": 4}
# Float32 lanes of a vector: one register of AVX-512, two of AVX2.
LANES = 16
# LLVM flags of operations whose order may change.
FAST = ("fast",)
# LLVM flags of multiplications and additions that may be fused, but not reordered: a row's bits are the same however
# many rows are computed together.
CONTRACT = ("contract",)
# Adding the first to a float32 of less than 2 ** 22 in size rounds that to an integer; the bits less the second are it.
ROUNDING, ROUNDING_BITS = 12582912.0, 0x4B400000
# Magnitude up to which exponentials are computed: that of a larger one would not be a normal float32.
LARGEST_EXPONENT = 87.0
# Factors of exp(x) = 2 ** n * exp(r), by Cephes' expf: 1 / log(2), log(2) in two parts, and a polynomial of
# (exp(r) - 1 - r) / r ** 2, from the highest power on.
LOG2_E = 1.4426950408889634
LN2 = (0.693359375, -2.12194440e-4)
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# The processor's features, as numba's settings say (NUMBA_CPU_FEATURES).
FEATURES = str(cpu_target.target_context.codegen().magic_tuple()[2]).split(",")
# Whether the processor converts a vector of float32 to bfloat16 in one instruction.
_CONVERTS = {"+avx512f", "+avx512bf16"} <= set(FEATURES)
F32, I1, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (1, 8, 16, 32, 64))


class _PartLibrary(JITCodeLibrary):
    """A part's code as numba emits it. Kernels link and optimize it: to do so here too doubles their compilation."""

    codegen = SimpleNamespace(set_env=lambda *_: None)  # of code that runs

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, _: str) -> int:
        return 0


class _PartCompiler(CompilerBase):
    def define_pipelines(self) -> list[Any]:
        self.state.library = _PartLibrary(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return [DefaultPassBuilder.define_nopython_pipeline(self.state)]


def kernel_part(*, fastmath: bool = False) -> Any:
    """Return a decorator for functions that kernels alone call, of which numba makes nothing that Python could call."""
    options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return njit(fastmath=fastmath, pipeline_class=_PartCompiler, **options)


class KernelArgs:
    """A kernel's parameters where code is emitted: the pointer to them, and their type, which has the constants."""

    def __init__(self, b: Any, pointer: Any, of: Any) -> None:
        self._b, self._pointer, self._fields = b, pointer, of.fields

    def constant(self, name: str) -> int:
        """Return a compile-time constant: the length of an array field."""
        return int(self._fields[name].type.shape[0])

    def load(self, name: str) -> Any:
        """Load a 64-bit integer field."""
        return load(self._b, self._b.ptrtoint(self._pointer, I64), int(self._fields[name].offset), I64, 1)


def emits(returns: Any = types.void) -> Callable[[Any], Any]:
    """Return a decorator that lets compiled code call a function, which emits the instructions of the call.

    It gets the builder and the call's arguments, a pointer to a kernel's parameters as KernelArgs, and returns the
    value, if any, of the type `returns`.
    """

    def decorate(emit: Any) -> Any:
        def define(typingctx: Any, *of: Any) -> Any:
            def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
                pairs = zip(of, arguments, strict=True)
                value = emit(b, *(KernelArgs(b, one, kind.dtype) if _has_fields(kind) else one for kind, one in pairs))
                return context.get_dummy_value() if value is None else value

            return returns(*of), generate

        define.__name__, define.__doc__ = emit.__name__, emit.__doc__
        define.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        return intrinsic(define)

    return decorate


def _has_fields(kind: Any) -> bool:
    return hasattr(getattr(kind, "dtype", None), "fields")


def cases(b: Any, value: Any, constants: Iterable[int]) -> Iterator[int]:
    """Emit a branch for each constant that a 64-bit integer may equal; gives the constant, known in its branch."""
    for constant in constants:
        with b.if_then(b.icmp_signed("==", value, int64(constant))):
            yield constant


def kind_bytes(kind: int) -> int:
    """Return the bytes of one element of a dtype in KINDS."""
    return {KINDS["float32"]: 4, KINDS["int8"]: 1}.get(kind, 2)


def int64(number: int) -> Any:
    """Return a 64-bit integer constant."""
    return ir.Constant(I64, number)


def vector_type(of: Any, lanes: int) -> Any:
    """Return the vector type of `lanes` elements."""
    return ir.VectorType(of, lanes)


def vector_of(of: Any, number: Any, lanes: int) -> Any:
    """Return a constant with a number in every lane."""
    return ir.Constant(vector_type(of, lanes), [number] * lanes)


def vector_pieces(size: int) -> Iterator[tuple[int, int]]:
    """Cut `size` elements into vectors [first, first + lanes) of LANES lanes or a smaller power of two."""
    first = 0
    while first < size:
        lanes = LANES
        while lanes > size - first:
            lanes //= 2
        yield first, lanes
        first += lanes


def load(b: Any, address: Any, offset: int, of: Any, align: int) -> Any:
    """Load a value of type `of` from an address; offset and align in bytes."""
    loaded = b.load(_at(b, address, offset, of))
    loaded.align = align
    return loaded


def store(b: Any, value: Any, address: Any, offset: int, align: int) -> None:
    """Store a value at an address; offset and align in bytes."""
    b.store(value, _at(b, address, offset, value.type)).align = align


def load_floats(b: Any, address: Any, first: int, lanes: int) -> Any:
    """Load `lanes` float32, from element `first` on."""
    return load(b, address, 4 * first, vector_type(F32, lanes), 4)


def load_as_float32(b: Any, kind: int, address: Any, first: int, lanes: int) -> Any:
    """Load `lanes` elements of a dtype in KINDS, from element `first` on, and convert them to float32."""
    if kind == KINDS["float32"]:
        return load_floats(b, address, first, lanes)
    if kind == KINDS["float16"]:
        return b.fpext(load(b, address, 2 * first, vector_type(ir.HalfType(), lanes), 2), vector_type(F32, lanes))
    if kind == KINDS["int8"]:
        codes = b.sext(load(b, address, first, vector_type(I8, lanes), 1), vector_type(I32, lanes))
        return b.sitofp(codes, vector_type(F32, lanes))
    halves = b.zext(load(b, address, 2 * first, vector_type(I16, lanes), 2), vector_type(I32, lanes))
    return b.bitcast(b.shl(halves, vector_of(I32, 16, lanes)), vector_type(F32, lanes))


def round_to_kind(b: Any, kind: int, wide: Any, lanes: int) -> Any:
    """Convert float32 to a dtype in KINDS, rounded to nearest, ties to even."""
    if kind == KINDS["float32"]:
        return wide
    if kind == KINDS["float16"]:
        return b.fptrunc(wide, vector_type(ir.HalfType(), lanes))
    if lanes == LANES and _CONVERTS:
        # Numbers below 2 ** -126 become 0.
        converting = ir.FunctionType(vector_type(I16, lanes), [wide.type])
        return b.call(ir.InlineAsm(converting, "vcvtneps2bf16 $1, $0", "=v,v"), [wide])
    bits = b.bitcast(wide, vector_type(I32, lanes))
    odd = b.and_(b.lshr(bits, vector_of(I32, 16, lanes)), vector_of(I32, 1, lanes))
    rounded = b.add(bits, b.add(odd, vector_of(I32, 0x7FFF, lanes)))
    return b.trunc(b.lshr(rounded, vector_of(I32, 16, lanes)), vector_type(I16, lanes))


def broadcast(b: Any, number: Any, lanes: int) -> Any:
    """Return a vector with a number in every lane."""
    first = b.insert_element(ir.Constant(vector_type(number.type, lanes), ir.Undefined), number, ir.Constant(I32, 0))
    return b.shuffle_vector(first, first, vector_of(I32, 0, lanes))


def sum_lanes(b: Any, wide: Any, lanes: int) -> Any:
    """Sum the lanes of a vector, pairwise."""
    return fold_lanes(b, wide, lanes, lambda one, other: b.fadd(one, other, flags=FAST))


def fold_lanes(b: Any, vector: Any, lanes: int, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine the halves of a vector until one lane is left."""
    while lanes > 1:
        lanes //= 2
        halves = [
            b.shuffle_vector(vector, vector, ir.Constant(vector_type(I32, lanes), list(range(at, at + lanes))))
            for at in (0, lanes)
        ]
        vector = combine(*halves)
    return b.extract_element(vector, ir.Constant(I32, 0))


def exponential(b: Any, x: Any, lanes: int) -> Any:
    """Return exp(x) of float32: 2 ** n times a polynomial; NaN of NaN."""
    for compare, bound in (("<", -LARGEST_EXPONENT), (">", LARGEST_EXPONENT)):
        limit = vector_of(F32, bound, lanes)
        x = b.select(b.fcmp_ordered(compare, x, limit), limit, x)
    rounding = vector_of(F32, ROUNDING, lanes)
    shifted = b.fadd(b.fmul(x, vector_of(F32, LOG2_E, lanes)), rounding)
    n = b.fsub(shifted, rounding)
    r = x
    for part in LN2:
        r = b.fsub(r, b.fmul(n, vector_of(F32, part, lanes)), flags=CONTRACT)
    y = vector_of(F32, EXP[0], lanes)
    for factor in EXP[1:]:
        y = b.fadd(b.fmul(y, r, flags=CONTRACT), vector_of(F32, factor, lanes), flags=CONTRACT)
    y = b.fadd(b.fadd(b.fmul(b.fmul(y, r), r), r), vector_of(F32, 1.0, lanes))
    whole = b.sub(b.bitcast(shifted, vector_type(I32, lanes)), vector_of(I32, ROUNDING_BITS - 127, lanes))
    return b.fmul(y, b.bitcast(b.shl(whole, vector_of(I32, 23, lanes)), vector_type(F32, lanes)))


def each_vector(b: Any, count: Any, emit: Callable[[Any, int, int], None], unrolled: int = 1) -> None:
    """Emit loops over `count` elements: emit(index, lanes, vectors) for so many vectors of so many lanes from index."""
    start = int64(0)
    for lanes, vectors in dict.fromkeys([(LANES, unrolled), (LANES, 1), (1, 1)]):
        step = int64(lanes * vectors)
        end = b.sub(count, b.srem(count, step))
        with cgutils.for_range_slice(b, start, end, step, I64) as (index, _):
            emit(index, lanes, vectors)
        start = end


def _at(b: Any, address: Any, offset: int, of: Any) -> Any:
    return b.inttoptr(b.add(address, int64(offset)), of.as_pointer())


def _pointer_to(what: Any, of: Any) -> Any:
    @emits(types.CPointer(what))
    def pointer(b, address):
        """Convert an address to a pointer, for carray."""
        return b.inttoptr(address, of.as_pointer())

    return pointer


float32_pointer, int64_pointer = _pointer_to(types.float32, F32), _pointer_to(types.int64, I64)
int32_pointer = _pointer_to(types.int32, I32)


# Number of times that a thread looks at a counter before it yields its core: some tens of microseconds.
_SPINS = 20_000


@emits(types.int64)
def fetch_add(b, counter):
    """Atomically increment a counter and return its old value."""
    return b.atomic_rmw("add", b.inttoptr(counter, I64.as_pointer()), int64(1), "seq_cst")


@emits(types.int64)
def compare_exchange(b, counter, expected, number):
    """Atomically set a counter to a number if it is the expected one, and return its old value."""
    pointer = b.inttoptr(counter, I64.as_pointer())
    return b.extract_value(b.cmpxchg(pointer, expected, number, "seq_cst", "seq_cst"), 0)


@emits(types.int64)
def load_counter(b, counter):
    """Atomically load a counter; sequentially consistent, so all writes before its increments are visible."""
    return b.load_atomic(b.inttoptr(counter, I64.as_pointer()), "seq_cst", 8)


@emits()
def _yield_thread(b):
    """Call POSIX sched_yield: another thread that waits for this core runs first."""
    b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, []), "sched_yield"), [])


@kernel_part()
def wait_for(counter, least):
    """Wait until a counter is `least` or more: a short time, unless the system has taken another thread's core."""
    spins = 0
    while load_counter(counter) < least:
        spins += 1
        if spins > _SPINS:
            _yield_thread()
