"""Test, on the CPU, steps that CUDA graphs capture: padded buffers give the same ids, no step waits for the device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex.worker.engine.model.runner import DecodeBuffers, padded_sizes

pytestmark = pytest.mark.model

CPU = torch.device("cpu")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of all operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=[False, True], ids=["plain", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    """All that is tested here holds in both modes."""
    return bool(request.param)


def with_buffers(engine: Any) -> Any:
    """Let an engine's plain decode steps go through padded buffers, as they do on CUDA."""
    engine._runner._buffers = DecodeBuffers(engine.limits.rows, engine.limits.max_tokens, engine._runner._cache, CPU)
    return engine


def test_sizes() -> None:
    assert padded_sizes(1) == (1,)
    assert padded_sizes(6) == (1, 2, 4, 6)
    assert padded_sizes(8) == (1, 2, 4, 8)
    assert len(padded_sizes(256)) == 19
    assert padded_sizes(256)[-10:] == (56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
    assert padded_sizes(33) == (1, 2, 4, 8, 16, 24, 32, 33)


def test_padded_decodes_give_the_same_ids(
    tiny: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(8)
    lengths = [1, 4, 9, 30, 17, 2, 12]
    prompts = [[chance.randrange(3, 320) for _ in range(length)] for length in lengths]
    requests = [tiny.request(f"r{index}", prompt, 6 + 4 * index) for index, prompt in enumerate(prompts)]
    requests += [tiny.request(name, [7, 8, 9], 5, name) for name in ("plain", "rslora")]
    engine = with_buffers(make_engine(tiny.directory, rows=7, kv_blocks=40, block_size=4, max_rank=16))
    sizes: list[int] = []
    inputs = DecodeBuffers.inputs

    def watched(buffers: DecodeBuffers, size: int) -> Any:
        sizes.append(size)
        return inputs(buffers, size)

    monkeypatch.setattr(DecodeBuffers, "inputs", watched)
    outputs = run_until_idle(engine, {0: requests[:4], 5: requests[4:]})
    for request in requests:
        ids = tuple(token for output in outputs[request.sequence_id] for token in output.token_ids)
        assert ids == tiny.expected(request)
    assert len(set(sizes)) >= 3


def test_a_decode_step_never_waits_for_the_device(tiny: Any, make_engine: Callable[..., Any]) -> None:
    """An operator whose result the host looks at, or whose shape depends on values, can't be captured."""
    engine = with_buffers(make_engine(tiny.directory, rows=4))
    runner = engine._runner
    runner._begin_empty(4, adapted=False)
    inputs = runner._buffers.inputs(4)
    with torch.inference_mode(), Recorder() as recorder:
        runner._forward(inputs)
    assert recorder.names & {"embedding", "index"}
    waits = {"_local_scalar_dense", "nonzero", "item", "lift_fresh", "masked_select", "_unique2", "equal"}
    assert recorder.names & waits == set()
