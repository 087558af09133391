"""A model's logits and answers without a scheduler: by the engine's own layers, adapters, attention and KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from artifacts.families import INT8
from worker.engine.attention.kv_cache import KvCache
from worker.engine.lora.adapter_memory import TorchAdapterMemory
from worker.engine.lora.weights import read_source
from worker.engine.model.inputs import step_inputs
from worker.engine.model.loader import LoadedModel
from worker.engine.model.model_layers import ModelLayers
from worker.engine.scheduling.sequence import Batch, Row
from worker.engine.scheduling.sequence import Sequence as Answer
from worker.engine.torch_engine import adapter_layers
from worker.engine_api import AdapterSource, EngineConfig, NewSequence

# Maximum number of a sequence's tokens that one step computes: their logits are held at once.
_STEP_TOKENS = 64
_BLOCK_SIZE = 16

Ids = tuple[int, ...]


class EvaluatedModel:
    """A loaded model with at most one adapter, for `rows` sequences of up to `tokens` tokens at once."""

    def __init__(
        self, loaded: LoadedModel, *, rows: int, tokens: int, max_rank: int = 1, kv_cache_dtype: str = ""
    ) -> None:
        """Take the loaded model, whose linear layers are replaced."""
        self._loaded = loaded
        self._per_row = -(-tokens // _BLOCK_SIZE)
        config = EngineConfig(str(loaded.directory), rows=rows, adapter_slots=1, max_rank=max_rank)
        self._max_rank = max_rank
        self._base = ModelLayers(loaded)
        self._lora = adapter_layers(loaded, config)
        self._slot = -1
        blocks, int8 = rows * self._per_row, kv_cache_dtype == INT8
        self._cache = KvCache(loaded.kv, blocks, _BLOCK_SIZE, loaded.dtype, loaded.device, int8=int8)

    def use_adapter(self, directory: str) -> None:
        """Apply an adapter from now on. Raises ArtifactError where the model does not take it."""
        loaded = self._loaded
        adaptable = {**loaded.linears, **(loaded.ends if loaded.device.type == "cpu" else {})}
        memory = TorchAdapterMemory(
            lambda source: read_source(source, adaptable, self._max_rank, self._base),
            self._lora.install,
            loaded.device,
            loaded.dtype,
        )
        packed = memory.read(AdapterSource(directory, directory))
        memory.install(memory.transfer(packed) if memory.transfers else packed, 0)
        self._slot = 0

    def logits(self, ids: Ids, first: int = 0) -> Iterator[Tensor]:
        """Yield the logits after each token from position `first` on, in float32: pieces of [tokens, vocabulary]."""
        return self._prefill(self._sequence(0, ids, first), first)

    def answers(
        self, prompts: Sequence[Ids], tokens: int, choose: Callable[[Tensor], Tensor], ends: frozenset[int]
    ) -> list[Ids]:
        """Answer the prompts, at most as many as the model has rows, with up to `tokens` tokens each.

        `choose` takes logits [rows, vocabulary] and returns an id for each row. A token of `ends` is an answer's last.
        """
        live = answers = [self._sequence(row, prompt, len(prompt) - 1) for row, prompt in enumerate(prompts)]
        for answer, prompt in zip(answers, prompts, strict=True):
            (logits,) = self._prefill(answer, len(prompt) - 1)
            answer.ids.append(int(choose(logits)))
        for _ in range(tokens - 1):
            live = [answer for answer in live if answer.ids[-1] not in ends]
            if not live:
                break
            chosen = choose(self._forward([Row(answer, len(answer.ids) - 1, 1, samples=True) for answer in live]))
            for answer, token in zip(live, chosen.tolist(), strict=True):
                answer.ids.append(token)
        return [tuple(answer.ids[len(prompt) :]) for answer, prompt in zip(answers, prompts, strict=True)]

    def _sequence(self, row: int, ids: Ids, first: int) -> Answer:
        """Return a sequence with blocks of its own, which asks for the logits from position `first` on."""
        spec = NewSequence(str(row), ids, prompt_logprobs=0, prompt_logprobs_start=first + 1)
        answer = Answer(spec, row, frozenset())
        answer.block_table = list(range(row * self._per_row, (row + 1) * self._per_row))
        answer.adapter_slot = self._slot
        return answer

    def _prefill(self, answer: Answer, first: int) -> Iterator[Tensor]:
        length = len(answer.ids)
        for start in range(0, length, _STEP_TOKENS):
            end = min(start + _STEP_TOKENS, length)
            logits = self._forward([Row(answer, start, end - start, samples=end == length)])
            if end > first:
                yield logits

    @torch.inference_mode()
    def _forward(self, rows: list[Row]) -> Tensor:
        """Compute a step: the logits that its rows ask for, in their order."""
        batch = Batch(tuple(rows), sum(row.count == 1 for row in rows), sum(row.count for row in rows))
        self._lora.begin_step(
            [(row.sequence.adapter_slot, row.count) for row in rows],
            [len(row.prompt_positions) + row.samples for row in rows],
        )
        inputs = step_inputs(batch, self._cache, self._loaded.device)
        with self._loaded.attention.during(inputs.attention):
            output = self._loaded.module(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                use_cache=False,
                logits_to_keep=inputs.wanted,
            )
        logits: Tensor = output.logits[0].float()
        return logits
