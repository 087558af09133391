"""A CUDA device that computes nothing: an engine's steps run on it without a GPU, and what they would do is recorded.

Tensors are torch's fake ones, which have a shape, a dtype and a device, and no numbers. So an operator whose result the
host must read raises, as one that waits for the device is to; Triton's kernels are counted by what they are compiled
for, and not compiled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import driver

from loraplex.contracts.options import TokenLogprobs
from loraplex.worker.engine import torch_engine
from loraplex.worker.engine.decoder import cuda
from loraplex.worker.engine.decoder.recognition import recognize
from loraplex.worker.engine.device import KernelCall
from loraplex.worker.engine.lora.weights import AdapterWeights, PackedAdapter
from loraplex.worker.engine.model.loader import LoadedModel, load_model
from loraplex.worker.engine.quantized.layers import QuantizedModule
from loraplex.worker.engine.sampling.step import InFlight, Sampled
from loraplex.worker.engine.scheduling.adapter_cache import AdapterCache
from loraplex.worker.engine.scheduling.batch import Row
from loraplex.worker.engine.scheduling.loader_threads import LoaderThreads
from loraplex.worker.engine.torch_engine import TorchEngine, build_engine
from loraplex.worker.engine_api import AdapterSource, EngineConfig

# Number of devices, and their compute capability.
DEVICES, CAPABILITY = 2, (9, 0)
# Bytes of memory of the device, and those of them that are free.
TOTAL_BYTES, FREE_BYTES = 80 << 30, 64 << 30
# Operators that launch nothing, besides those whose result is a view.
_NO_LAUNCH = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "_unsafe_view", "device"}
)


class HostWaitsError(BaseException):
    """The host would wait for the device. No Exception: sampling guards its rows from those of each other."""


class FakeCuda(TorchDispatchMode):
    """Records what a program launches on the device: `launches` are the names of operators and kernels, in order.

    With `serving`, a copy for which the host waits raises HostWaitsError.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[str] = []
        self.kernels: list[KernelCall] = []
        # The specializations that kernels were compiled for, and the number of compilations.
        self.compiled: set[str] = set()
        self.serving = False
        self.streams = 0
        # Number of kernels that had been launched whenever the free memory was read.
        self.memory_reads: list[int] = []
        # Number of kernels that had been launched when the last graph was captured.
        self.captured_at = 0
        # Number of the thread's current device, on which Triton launches.
        self.current = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten":
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if isinstance(result, FakeTensor):
            result.constant = None  # else copies to the device are made in earnest
        name = func.overloadpacket.__name__
        tensors = [one for one in (*args, *kwargs.values(), result) if isinstance(one, Tensor)]
        devices = {one.device.type for one in tensors}
        if self.serving and devices == {"cpu", "cuda"}:
            self._check_copy(name, tensors, args, kwargs)
        several = name.startswith("_foreach") and any(one.is_cuda for one in args[0])
        if several or ("cuda" in devices and not func.is_view and name not in _NO_LAUNCH):
            self.launches.append(name)
        return result

    def _check_copy(self, name: str, tensors: list[Tensor], args: Any, kwargs: Mapping[str, Any]) -> None:
        waits = name in ("_to_copy", "copy_") and not (kwargs.get("non_blocking") or args[2:3] in ((True,), [True]))
        scalars = all(one.dim() == 0 for one in tensors if one.device.type == "cpu")
        # Other operators take a number of the host as an argument; those with indices copy it to the device.
        if waits or (name.startswith("index") and scalars):
            raise HostWaitsError(f"{name} copies between host and device, and waits")

    def make_stream(self) -> _Stream:
        """Return a new stream."""
        self.streams += 1
        return _Stream()

    def memory(self) -> tuple[int, int]:
        """Return the free bytes, and all bytes."""
        self.memory_reads.append(len(self.kernels))
        return FREE_BYTES, TOTAL_BYTES

    def capture(self) -> AbstractContextManager[None]:
        """Record a capture of a graph, before which torch empties its caches."""
        self.captured_at = len(self.kernels)
        return nullcontext()

    def launch(self, call: KernelCall) -> None:
        """Record a launch of a Triton kernel in place of it. Its tensors must be on the current device."""
        devices = {one.device.index for one in call.arguments.values() if isinstance(one, Tensor)}
        assert devices <= {self.current}, f"{call.kernel.__name__} of devices {devices} is launched on {self.current}"
        self.launches.append(call.kernel.__name__)
        self.kernels.append(call)
        self.compiled.add(specialization(call))


def specialization(call: KernelCall) -> str:
    """Return what decides whether a launch needs a compilation: types, constants, and what Triton knows of integers."""
    known: dict[str, Any] = {}
    for parameter in call.kernel.params:
        value = call.arguments.get(parameter.name, call.constants.get(parameter.name))
        if parameter.name in call.constants or value is None or isinstance(value, (float, bool)):
            known[parameter.name] = repr(value) if parameter.name in call.constants else type(value).__name__
        elif isinstance(value, Tensor):
            aligned = not parameter.do_not_specialize_on_alignment and value.storage_offset() * value.itemsize % 16 == 0
            known[parameter.name] = str(value.dtype), aligned
        else:
            bits = 32 if -(2**31) <= value < 2**31 else 64
            special = not parameter.do_not_specialize
            known[parameter.name] = bits, special and value == 1, special and value % 16 == 0
    return json.dumps([call.kernel.__name__, call.warps, call.stages, known])


# Methods that ask the driver for the current device first, and operators that do the same without it.
_OPERATORS: dict[Any, Any] = {Tensor.copy_: torch.ops.aten.copy_.default, Tensor.__invert__: torch.bitwise_not}


class _Indexing(TorchFunctionMode):
    """Index fake tensors by operators: torch's own way asks the driver for the current device first.

    A Python number that is written through indices is what the host would copy to the device, and wait.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            part, indices = _part(*args)
            return torch.ops.aten.index.Tensor(part, indices) if indices else part
        if func is Tensor.__setitem__:
            (part, indices), value = _part(*args[:2]), args[2]
            if indices and not isinstance(value, Tensor):
                raise HostWaitsError(f"{value} is written through indices, and is copied to the device first")
            if indices:
                return torch.ops.aten.index_put_.default(part, indices, value)
            return torch.ops.aten.copy_.default(part, value) if isinstance(value, Tensor) else part.fill_(value)
        return _OPERATORS.get(func, func)(*args, **(kwargs or {}))


def _part(tensor: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Apply the slices of an index; return what is left, and the index tensors of its dimensions."""
    keys = key if isinstance(key, tuple) else (key,)
    left = sum(one is not None and one is not Ellipsis for one in keys)
    at, indices = 0, list[Tensor | None]()
    for one in keys:
        left -= one is not None and one is not Ellipsis
        if one is Ellipsis:
            at = tensor.dim() - left
        elif one is None:
            tensor, at = tensor.unsqueeze(at), at + 1
        elif isinstance(one, slice):
            stop = tensor.shape[at] if one.stop is None else one.stop
            tensor, at = torch.ops.aten.slice.Tensor(tensor, at, one.start, stop, one.step or 1), at + 1
        elif isinstance(one, int):
            tensor = tensor.select(at, one)
        else:
            indices += [None] * (at - len(indices)) + [one]
            at += 1
    return tensor, indices


class _Stream:
    def wait_stream(self, other: Any) -> None: ...


class _Graph:
    def pool(self) -> tuple[int, int]:
        return 0, 1

    def replay(self) -> None: ...


class _Event:
    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def _found(device: FakeCuda, tensors: FakeTensorMode) -> Iterator[None]:
    """Let torch find CUDA devices, in this thread, and record what is launched on them."""
    replaced = torch.empty

    def set_device(chosen: torch.device) -> None:
        device.current = chosen.index

    functions: dict[str, Any] = {
        "init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": lambda: device.current,
        "set_device": set_device,
        "get_device_capability": lambda _=None: CAPABILITY,
        "mem_get_info": lambda _=None: device.memory(),
        "empty_cache": lambda: None,
        "synchronize": lambda _=None: None,
        "Stream": lambda _=None: device.make_stream(),
        "current_stream": lambda _=None: _Stream(),
        "stream": lambda stream: nullcontext(),
        "Event": _Event,
        "CUDAGraph": _Graph,
        "graph": lambda graph, **_: device.capture(),
    }

    def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return replaced(*sizes, **options)

    def launch(call: KernelCall) -> None:
        device.launch(call)

    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **functions))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda tensor: tensor))
        stack.enter_context(patch.object(torch, "empty", empty))
        stack.enter_context(patch.object(KernelCall, "launch", launch))
        stack.enter_context(patch.object(driver, "_active", object()))
        stack.enter_context(tensors)
        stack.enter_context(device)
        stack.enter_context(_Indexing())
        yield


class _Adapters:
    """Adapters that take no time and have no numbers: every slot's ranks are what the device would be told."""

    transfers = False

    def __init__(self, install: Callable[[AdapterWeights, int], None]) -> None:
        self._install = install

    def read(self, source: AdapterSource) -> PackedAdapter:
        return PackedAdapter(AdapterWeights({}, 1), torch.zeros(1))

    def transfer(self, prepared: PackedAdapter) -> PackedAdapter:
        return prepared

    def install(self, prepared: PackedAdapter, slot: int) -> None:
        self._install(prepared.weights, slot)

    def size(self, prepared: PackedAdapter) -> int:
        return 1


class FakeEngine:
    """An engine on a fake device of its own, whose answers are drawn; it serves within `here` alone."""

    def __init__(self, config: EngineConfig, seed: int = 1, **options: Any) -> None:
        self.device, self._tensors = FakeCuda(), FakeTensorMode()
        self._chance = random.Random(seed)
        with self._found():
            made: dict[str, Any] = {"load_model": self._load, "adapter_cache": _adapter_cache}
            with patch.multiple(torch_engine, **made), patch.object(cuda, "recognize", _in_earnest(recognize)):
                self.engine = build_engine(config, **{"paced": False} | options)
            self.device.serving = True

    @contextmanager
    def here(self) -> Iterator[None]:
        """Let this thread see the device, and no other tensors."""

        def collect(step: InFlight) -> Sampled:
            return self._collect(step)

        with self._found(), patch.object(InFlight, "collect", collect):
            yield

    @contextmanager
    def _found(self) -> Iterator[None]:
        with torch.inference_mode(), _found(self.device, self._tensors):
            yield

    def _load(self, model: str, device: str, dtype: str, quantize: str, group: None, **_: Any) -> LoadedModel:
        on, current = torch.device(device), self.device.current
        assert current == (on.index or 0), f"weights of {on} are loaded while {current} is current"
        with _disable_current_modes():
            loaded = load_model(model, "cpu", dtype, quantize)
        _move(loaded.module, torch.device("cuda", current))
        return replace(loaded, device=torch.device("cuda", current))

    def _draw(self, row: Row) -> int:
        grammar = row.sequence.grammar
        if grammar is not None and row.place:
            grammar = grammar.copy()
            grammar.replay(row.drafted)
        allowed = grammar.allowed_ids(frozenset()).tolist() if grammar is not None and row.live else None
        return self._chance.choice(allowed) if allowed else self._chance.randrange(self.engine.limits.vocab_size)

    def _collect(self, step: InFlight) -> Sampled:
        assert not step.failures, step.failures
        for row, _ in step.prompts:
            row.sequence.prompt_logprobs += [TokenLogprobs(0.0, ())] * len(row.prompt_positions)
        for row, _ in step.vectors:
            row.sequence.vector = (0.0,)
        ids = [self._draw(row) for row in step.rows]
        return Sampled(ids, step.failures, [TokenLogprobs(0.0, ())] * len(ids) if step.logprobs else [])


def _adapter_cache(
    base: Any, config: EngineConfig, on_loaded: Callable[[], None], *installs: Any, make: Any
) -> AdapterCache[Any]:
    loads = LoaderThreads[PackedAdapter](on_loaded)
    return AdapterCache(config.adapter_slots, _Adapters(installs[0]), loads, 1 << 20)


@contextmanager
def fake_engine(config: EngineConfig, seed: int = 1) -> Iterator[tuple[TorchEngine, FakeCuda]]:
    """Build an engine on a fake device; it serves in this thread, within the context."""
    fake = FakeEngine(config, seed)
    with fake.here():
        yield fake.engine, fake.device
        fake.engine.close()


class RehearsedEngine:
    """Stands in for a TorchEngine: its calls alone see the fake device, between them the CPU computes."""

    def __init__(self, config: EngineConfig, **options: Any) -> None:
        self._fake = FakeEngine(replace(config, device="cuda"), **options)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._fake.engine, name)

        def call(*arguments: Any) -> Any:
            with self._fake.here():
                return value(*arguments)

        return call if callable(value) else value


def _in_earnest(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes on the CPU, with real numbers."""

    def call(*arguments: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments)

    return call


def _move(module: nn.Module, device: torch.device) -> None:
    """Replace a module's numbers by fake ones on a device."""
    moved: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        return moved.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype, device=device))

    for child in module.modules():
        if isinstance(child, QuantizedModule):
            weight = child.weight
            zeros = None if weight.zeros is None else fake(weight.zeros)
            child.weight = replace(weight, codes=fake(weight.codes), scales=fake(weight.scales), zeros=zeros)
        for name, tensor in [*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)]:
            own = fake(tensor)
            setattr(child, name, nn.Parameter(own, requires_grad=False) if isinstance(tensor, nn.Parameter) else own)
