"""Launches of a decode step on CUDA, counted without a device: `python -m bench.launches [--quick] [--json FILE]`.

Tiny models of Llama's form with two and with four layers run on a fake device (bench/fake_cuda.py). What the larger
one launches more is what two layers take. A launch is an operator of torch's that computes or copies on the device, or
a kernel of Triton's; an operator that launches several kernels counts once.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from bench.command import run_command
from bench.fake_cuda import fake_engine
from bench.models import TINY, save_model
from bench.report import Aim, Report
from worker.engine_api import EngineConfig

SHAPE = replace(TINY, name="tiny-llama", family="llama")
LAYERS = (2, 4)
ROWS = 8
AIMS = {"launches_a_layer": Aim(at_most=14), "launches_a_layer_adapters": Aim(at_most=18), "launches_besides": Aim()}


def main() -> int:
    """Run the count with the command line's arguments; return the exit code."""
    run_command("launches", __doc__ or "", measure)
    return 0


def measure(quick: bool) -> Report:
    """Count the launches of a step of rows without adapters, and of one with them."""
    steps = {adapted: _per_layer(adapted) for adapted in (False, True)}
    (base, besides), (adapters, _) = steps[False], steps[True]
    return Report(
        name="launches",
        command="python -m bench.launches" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(SHAPE) | {"rows": ROWS},
        rows=[{"launch": name, "a layer": base[name], "with adapters": adapters[name]} for name in sorted(adapters)],
        ratios={
            "launches_a_layer": sum(base.values()),
            "launches_a_layer_adapters": sum(adapters.values()),
            "launches_besides": sum(besides.values()),
        },
        aims=AIMS,
    )


def _per_layer(adapted: bool) -> tuple[Counter[str], Counter[str]]:
    """Return the launches of a layer, and those of a step besides its layers, by name."""
    few, many = (_launches(layers, adapted) for layers in LAYERS)
    layer = Counter({name: (many[name] - few[name]) // (LAYERS[1] - LAYERS[0]) for name in many})
    return +layer, few - Counter({name: count * LAYERS[0] for name, count in layer.items()})


def _launches(layers: int, adapted: bool) -> Counter[str]:
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as directory:
        model = save_model(replace(SHAPE, layers=layers), Path(directory))
        config = EngineConfig(str(model), "cuda", rows=ROWS, kv_blocks=64, adapter_slots=2, max_rank=16)
        with fake_engine(config) as (engine, device):
            runner, buffers = engine._runner, engine._runner._buffers
            assert buffers is not None, "an engine on CUDA has buffers"
            runner._begin_empty(ROWS, adapted)
            device.launches.clear()
            runner._forward(buffers.inputs(ROWS))
            return Counter(device.launches)


if __name__ == "__main__":
    sys.exit(main())
