"""A model's logits and answers without a scheduler: by the engine's own layers, adapters, attention and KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from artifacts import ArtifactError
from artifacts.base_model import BaseModel, read_base_model
from artifacts.checkpoint import read_small_file
from artifacts.families import INT8
from worker.engine.attention.paged import KvCache
from worker.engine.device import step_threads
from worker.engine.lora.adapter_memory import adapter_memory
from worker.engine.lora.base_layers import ModelLayers
from worker.engine.model.loader import LoadedModel, load_model
from worker.engine.model.runner import step_inputs
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
        memory = adapter_memory(self._base, self._max_rank, self._lora.install)
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
                logits_to_keep=inputs.logit_places,
            )
        logits: Tensor = output.logits[0].float()
        return logits


@dataclass(frozen=True)
class ModelPair:
    """The two models; both compute in float32, so that their difference is the quantization's alone."""

    original: LoadedModel
    quantized: LoadedModel


def load_pair(model: str, quantized: str, device: str) -> ModelPair:
    """Load the model in directory `model`, and `quantized`: its scheme, or the directory of a quantized copy.

    An empty scheme loads the model as it is. Raises ArtifactError where the copy is another model's, and
    ModelUnusableError.
    """
    copied = bool(quantized) and Path(quantized).is_dir()
    if copied:
        check_copy(read_base_model(model, "model"), read_base_model(quantized, "model"), quantized)
    original = load_model(model, device, "float32")
    torch.set_num_threads(step_threads(original.parameters, 0))
    copy = load_model(quantized, device, "float32") if copied else load_model(model, device, "float32", quantized)
    return ModelPair(original, copy)


def check_copy(original: BaseModel, copy: BaseModel, directory: str) -> None:
    """Check that a quantized model may be the original's copy. Raises ArtifactError."""
    if not copy.quantization:
        raise ArtifactError("--quantized", f"{directory} is not quantized; give a quantized copy, or a scheme")
    if copy.modules != original.modules or copy.original_digest not in {"", original.digest}:
        raise ArtifactError("--quantized", f"{directory} is not a quantized copy of the model")


class TextCodec:
    """The tokenizer of a model directory, as routers use it."""

    def __init__(self, directory: Path) -> None:
        """Read the tokenizer. Raises ArtifactError."""
        data = read_small_file(directory / "tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError("tokenizer.json", f"cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, with the special tokens that the tokenizer adds to a prompt."""
        return tuple(self._tokenizer.encode(text).ids)

    def decode(self, ids: Ids) -> str:
        """Return the text of ids, without special tokens."""
        text: str = self._tokenizer.decode(list(ids))
        return text


# Largest divergence, and largest loss of a token, in nats that count: those of a model that is broken are infinite.
_WORST = 700.0


@dataclass
class Differences:
    """Sums over the tokens that were compared. Divergences are of the quantized model from the original, in nats."""

    tokens: int = 0
    # Tokens whose best next token is the same.
    agreed: int = 0
    kl: float = 0.0
    max_kl: float = 0.0
    # Sums of the negative log probabilities of the text's own next tokens.
    original_loss: float = 0.0
    quantized_loss: float = 0.0

    @property
    def agreement(self) -> float:
        """Return the share of tokens after which the best next token is the same."""
        return self.agreed / self.tokens

    @property
    def mean_kl(self) -> float:
        """Return the mean divergence, which rounding does not lift above the largest."""
        return min(self.kl / self.tokens, self.max_kl)

    @property
    def perplexities(self) -> tuple[float, float]:
        """Return the perplexity of the text for the original and for the quantized model."""
        losses = self.original_loss / self.tokens, self.quantized_loss / self.tokens
        before, after = (math.exp(min(loss, _WORST)) for loss in losses)
        return before, after

    @torch.inference_mode()
    def add(self, original: Tensor, quantized: Tensor, following: Tensor) -> None:
        """Compare logits [tokens, vocabulary] of both models, after which the tokens `following` [tokens] come.

        Raises ArtifactError where the original's are not numbers; where the quantized model's are not, nothing agrees.
        """
        if original.isnan().any():
            raise ArtifactError("model", "the original's logits are not numbers: it, or the adapter, is broken")
        # In float64: a divergence is a small difference of large sums.
        p, q = original.double().log_softmax(-1), quantized.double().log_softmax(-1)
        divergences = (p.exp() * (p - q)).sum(-1).nan_to_num_(_WORST, _WORST).clamp_(0, _WORST)
        self.tokens += len(following)
        self.agreed += int(((p.argmax(-1) == q.argmax(-1)) & ~q.isnan().any(-1)).sum())
        self.kl += float(divergences.sum())
        self.max_kl = max(self.max_kl, float(divergences.max()))
        chosen = following.to(p.device)[:, None]
        self.original_loss -= float(p.gather(1, chosen).sum())
        self.quantized_loss -= float(q.gather(1, chosen).nan_to_num_(-_WORST, neginf=-_WORST).sum())
