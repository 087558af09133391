"""Launches of a decode step on CUDA, counted without a device: `python -m bench.launches [--quick] [--json FILE]`.

Tiny models of several families run on a fake device (bench/fake_cuda.py). What is launched between the beginnings of
two of their layers is what a layer takes. A launch is an operator of torch's that computes or copies on the device, or
a kernel of Triton's; an operator that launches several kernels counts once. --quick counts those of Llama alone.
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
from loraplex.worker.engine_api import EngineConfig

# Layers as Llama's; with norms of each query and key; with norms around attention and MLP; with norms after them alone.
FAMILIES = ("llama", "qwen3", "gemma3_text", "olmo2")
LAYERS = 3
ROWS = 2
AIMS = {"launches_a_layer": Aim(at_most=14), "launches_a_layer_adapters": Aim(at_most=18), "launches_besides": Aim()}


def main() -> int:
    """Run the count with the command line's arguments; return the exit code."""
    run_command("launches", __doc__ or "", measure)
    return 0


def measure(quick: bool) -> Report:
    """Count the launches of a step of rows without adapters, and of one with them; of the family that has the most."""
    rows, base, adapters, besides = [], list[int](), list[int](), list[int]()
    for family in FAMILIES[:1] if quick else FAMILIES:
        (layer, rest), (adapted, _) = _launches(family)
        rows += [
            {"family": family, "launch": name, "a layer": layer[name], "with adapters": adapted[name]}
            for name in sorted(adapted)
        ]
        base.append(sum(layer.values()))
        adapters.append(sum(adapted.values()))
        besides.append(sum(rest.values()))
    return Report(
        name="launches",
        command="python -m bench.launches" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(TINY) | {"rows": ROWS, "layers": LAYERS},
        rows=rows,
        ratios={
            "launches_a_layer": max(base),
            "launches_a_layer_adapters": max(adapters),
            "launches_besides": max(besides),
        },
        aims=AIMS,
    )


def _launches(family: str) -> list[tuple[Counter[str], Counter[str]]]:
    """Return a layer's launches, and those of a step besides its layers, by name: without adapters and with."""
    shape = replace(TINY, name=f"tiny-{family}", family=family, layers=LAYERS)
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as directory:
        model = save_model(shape, Path(directory))
        config = EngineConfig(str(model), "cuda", rows=ROWS, kv_blocks=64, adapter_slots=2, max_rank=16)
        with fake_engine(config) as (engine, device):
            runner, buffers = engine._runner, engine._runner._buffers
            assert buffers is not None, "an engine on CUDA has buffers"
            begins: list[int] = []
            for layer in runner._module.model.layers:
                layer.register_forward_pre_hook(lambda *_: begins.append(len(device.launches)))
            counts = []
            for adapted in (False, True):
                runner._begin_empty(ROWS, adapted)
                device.launches.clear()
                begins.clear()
                runner._forward(buffers.inputs(ROWS))
                # The first layer has a normalization before it that the others have after the layer before.
                one = Counter(device.launches[slice(*begins[1:3])])
                counts.append((one, Counter(device.launches) - Counter({name: LAYERS * one[name] for name in one})))
            return counts


if __name__ == "__main__":
    sys.exit(main())
