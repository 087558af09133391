"""The peers of the benchmarks: transformers' generate, transformers' continuous batching, peft's mixed batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.rounds import Timed
from bench.workload import Request, answered_tokens

# Requests of a static batch.
_BATCH = 8
# Maximum tokens of a step, enough for all prompts, and the number of 256-token blocks, enough for all answers. By
# default continuous batching takes nine tenths of the memory.
_STEP_TOKENS, _BLOCKS = 2048, 64
# Timeout in seconds for an answer of continuous batching, after which it counts as stuck.
_STUCK_S = 120


class StaticBatches:
    """transformers' `generate` in batches of `batch`; with `adapters`, peft's `adapter_names` gives each row its own.

    A batch runs until its longest answer is complete. Only the requested tokens of shorter answers count.
    """

    def __init__(self, model: Path, adapters: Sequence[Path] = (), device: str = "cpu", batch: int = _BATCH) -> None:
        self._module = _load(model, device)
        self._device = device
        self._batch = batch
        self._names = [directory.name for directory in adapters]
        for directory in adapters:
            if directory is adapters[0]:
                self._module = PeftModel.from_pretrained(self._module, directory, adapter_name=directory.name).eval()
            else:
                self._module.load_adapter(directory, adapter_name=directory.name)

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> Timed:
        """Answer the requests, batch after batch, and time them."""
        start = time.perf_counter()
        for first in range(0, len(requests), self._batch):
            batch = requests[first : first + self._batch]
            ids = torch.tensor([request.prompt_ids for request in batch], device=self._device)
            options: dict[str, Any] = {}
            if self._names:
                options["adapter_names"] = [self._names[request.adapter or 0] for request in batch]
            self._module.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max(request.tokens for request in batch),
                do_sample=False,
                **options,
            )
        return Timed(answered_tokens(requests), time.perf_counter() - start)


class ContinuousBatches:
    """transformers' ContinuousBatchingManager, kept warm while the context is open; it has no adapters."""

    def __init__(
        self, model: Path, device: str = "cpu", step_tokens: int = _STEP_TOKENS, blocks: int = _BLOCKS
    ) -> None:
        self._module = _load(model, device)
        self._step_tokens = step_tokens
        self._blocks = blocks
        self._runs = 0

    def __enter__(self) -> Self:
        """Start the manager's thread."""
        self._manager = self._module.init_continuous_batching(
            GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0),  # type: ignore[no-untyped-call]
            ContinuousBatchingConfig(num_blocks=self._blocks, max_batch_tokens=self._step_tokens),
        )
        self._manager.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the manager's thread."""
        self._manager.stop(block=True)

    def run(self, requests: Sequence[Request]) -> Timed:
        """Answer the requests, which all arrive at once, and time them."""
        self._runs += 1
        start = time.perf_counter()
        for index, request in enumerate(requests):
            name = f"{self._runs}-{index}"
            self._manager.add_request(list(request.prompt_ids), request_id=name, max_new_tokens=request.tokens)
        finished = 0
        while finished < len(requests):
            result = self._manager.get_result(timeout=_STUCK_S)
            if result is None or result.error:
                raise RuntimeError(f"transformers' continuous batching failed: {result and result.error}")
            finished += result.is_finished()
        return Timed(answered_tokens(requests), time.perf_counter() - start)


def _load(model: Path, device: str) -> Any:
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
    return module.eval().requires_grad_(False).to(device)
