"""Runs an engine on the CPU with the adapters' kernels interpreted: python cuda_engine_cases.py cpu, cases on stdin.

A case is {"model", "settings", "buffers", "requests"}: with `buffers` decode steps go through padded buffers, as CUDA
graphs hold them. Prints for each case {"answers": {request: [ids, log probabilities of all ids at each position]},
"padded": how many steps with adapters went through the buffers}. A program of its own, because TRITON_INTERPRET=1 must
be set before Triton is first imported.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine import torch_engine
from loraplex.worker.engine.decoder.cuda import use_kernels
from loraplex.worker.engine.lora.cuda import adapt_linears
from loraplex.worker.engine.lora.cuda_experts import adapt_experts
from loraplex.worker.engine.lora.weights import AdapterLayers
from loraplex.worker.engine.model.loader import LoadedModel
from loraplex.worker.engine.model.runner import DecodeBuffers
from loraplex.worker.engine.quantized import cuda
from loraplex.worker.engine.quantized.layers import QuantizedLinear
from loraplex.worker.engine_api import AdapterSource, EngineConfig, NewSequence
from tests.worker.engine.interpreted import interpret_quickly


def answers(case: dict[str, Any]) -> dict[str, Any]:
    """Return the answers of the engine to a case."""
    padded = 0

    def counting(loaded: LoadedModel, config: EngineConfig) -> AdapterLayers:
        module, slots, rank, rows = loaded.module, config.adapter_slots, config.max_rank, config.rows
        layers: AdapterLayers = adapt_linears(module, loaded.linears, slots, rank, rows, loaded.device, loaded.dtype)
        if rank := config.max_expert_rank:
            layers = adapt_experts(layers, module, loaded.experts, slots, rank, rows, loaded.device, loaded.dtype)
        use_kernels(module, loaded.dtype, loaded.context_length)
        begin = layers.begin_decode

        def begin_decode(row_slots: Sequence[int], size: int) -> None:
            nonlocal padded
            padded += max(row_slots) >= 0
            begin(row_slots, size)

        layers.begin_decode = begin_decode  # type: ignore[assignment, method-assign]
        return layers

    torch_engine.adapter_layers = counting
    settings = dict(case["settings"])
    ahead = settings.pop("ahead", None)
    config = EngineConfig(case["model"], dtype="float32", **settings)
    engine = torch_engine.build_engine(config, ahead=ahead, paced=False)
    if case["buffers"]:
        runner = engine._runner
        runner._buffers = DecodeBuffers(
            engine.limits.rows, engine.limits.max_tokens, runner._cache, torch.device("cpu")
        )
    made: dict[str, tuple[list[int], list[list[float]]]] = {}
    for name, (prompt, tokens, adapter, invocation, invoked_at) in case["requests"].items():
        source = AdapterSource(adapter, adapter, invocation=tuple(invocation)) if adapter else None
        every = engine.limits.vocab_size
        engine.add_sequence(
            NewSequence(
                name,
                tuple(prompt),
                adapter=source,
                stopping=StoppingParams(tokens),
                logprobs=every,
                prompt_logprobs=every,
                invoked_at=invoked_at,
            )
        )
        made[name] = [], []
    unfinished = set(made)
    while unfinished:
        for output in engine.step():
            ids, logprobs = made[output.sequence_id]
            ids += output.token_ids
            for one in (*output.prompt_logprobs, *output.logprobs):
                logprobs.append([logprob for _, logprob in sorted(one.alternatives)])
            if output.finish:
                unfinished.remove(output.sequence_id)
    engine.close()
    return {"answers": made, "padded": padded}


dequantized = QuantizedLinear.forward


def by_kernel(layer: QuantizedLinear, x: Tensor) -> Tensor:
    """Compute a quantized layer as on CUDA; but the interpreter is for one thread, and loaders have others."""
    alone = threading.current_thread() is threading.main_thread()
    return cuda.multiply(x, layer.weight, layer.bias) if alone else dequantized(layer, x)


if __name__ == "__main__":
    torch.set_num_threads(1)
    interpret_quickly()
    QuantizedLinear.forward = by_kernel  # type: ignore[assignment, method-assign]
    print(json.dumps([answers(case) for case in json.load(sys.stdin)]))
