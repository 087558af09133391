"""The report of a quantized model: its size, the error of its weights, and what that does to a text.

perplexity and divergence   over the text, in windows of the context, each from an empty context on
before and after            greedy continuations of the text's beginning
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken as Entry
from tokenizers import Tokenizer
from torch import Tensor, nn

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.added_tokens import AddedToken
from loraplex.contracts.artifacts.base_model import BaseModel, read_base_model
from loraplex.contracts.artifacts.checkpoint import read_checkpoint, read_small_file
from loraplex.contracts.artifacts.families import INT8
from loraplex.worker.engine.attention.paged import KvCache
from loraplex.worker.engine.device import make_current, step_threads
from loraplex.worker.engine.lora.base_layers import ModelLayers
from loraplex.worker.engine.lora.weights import adapter_memory
from loraplex.worker.engine.model.encoding import Encoding
from loraplex.worker.engine.model.loader import LoadedModel, device_of, load_model
from loraplex.worker.engine.model.runner import Runner
from loraplex.worker.engine.quantized.weight import QuantizedWeight
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine.scheduling.sequence import Sequence as Answer
from loraplex.worker.engine.torch_engine import adapter_layers
from loraplex.worker.engine_api import AdapterSource, EngineConfig, NewSequence

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
        self._per_row = -(-tokens // _BLOCK_SIZE)
        config = EngineConfig(str(loaded.directory), rows=rows, adapter_slots=1, max_rank=max_rank)
        self._max_rank = max_rank
        self._base = ModelLayers(loaded)
        self._lora = adapter_layers(loaded, config)
        self._slot = -1
        blocks, int8 = rows * self._per_row, kv_cache_dtype == INT8
        cache = KvCache(loaded.kv, blocks, _BLOCK_SIZE, loaded.dtype, loaded.device, int8=int8)
        self._runner = Runner(loaded, cache, self._lora, Encoding(loaded, 1), ahead=False)

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

    def _forward(self, rows: list[Row]) -> Tensor:
        """Compute a step: the logits that its rows ask for, in their order."""
        batch = Batch(tuple(rows), sum(row.count == 1 for row in rows), sum(row.count for row in rows))
        # A copy: the next step's logits may be in the same memory.
        return self._runner.execute(self._runner.layout(batch)).to(torch.float32, copy=True)


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
    make_current(device_of(device))
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
    """The tokenizer of a model directory, as routers use it, with an adapter's own tokens."""

    def __init__(self, directory: Path, tokens: Sequence[AddedToken] = ()) -> None:
        """Read the tokenizer. Raises ArtifactError."""
        data = read_small_file(directory / "tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError("tokenizer.json", f"cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.add_tokens(
            [Entry(**{name: value for name, value in asdict(token).items() if name != "id"}) for token in tokens]
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Ids:
        """Return the ids of a text, with the special tokens that the tokenizer adds to a prompt."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Ids) -> str:
        """Return the text of ids, without special tokens."""
        text: str = self._tokenizer.decode(list(ids))
        return text

    def end_ids(self, ends: Sequence[str | int]) -> Ids:
        """Return the ids of an adapter's end tokens."""
        ids = (self._tokenizer.token_to_id(end) if isinstance(end, str) else end for end in ends)
        return tuple(end for end in ids if end is not None)


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


@dataclass
class WeightError:
    """The error of the weights of one kind of layer, such as q_proj: of `layers` layers with `weights` weights."""

    kind: str
    layers: int = 0
    weights: int = 0
    max_error: float = 0.0
    # Sums of the absolute errors, of their squares, and of the squares of the original weights.
    absolute: float = 0.0
    squares: float = 0.0
    own_squares: float = 0.0

    @property
    def mean_error(self) -> float:
        """Return the mean absolute error."""
        return self.absolute / self.weights

    @property
    def relative_error(self) -> float:
        """Return the norm of the error over the norm of the weights."""
        return float((self.squares / self.own_squares) ** 0.5) if self.own_squares else 0.0

    def add(self, original: Tensor, quantized: Tensor) -> None:
        """Add a layer: its weight as given, and dequantized."""
        error = (quantized.float() - original.float()).abs_()
        self.layers += 1
        self.weights += error.numel()
        self.max_error = max(self.max_error, float(error.max()))
        self.absolute += float(error.sum(dtype=torch.float64))
        self.squares += float(error.square_().sum(dtype=torch.float64))
        self.own_squares += float(original.float().square().sum(dtype=torch.float64))


@torch.inference_mode()
def weight_errors(original: nn.Module, quantized: nn.Module) -> list[WeightError]:
    """Compare each quantized weight with the original's, by kind of layer in the order of the model."""
    by_kind: dict[str, WeightError] = {}
    for name, module in quantized.named_modules():
        weight = _quantized_weight(module)
        if weight is not None:
            kind = name.rpartition(".")[2]
            own: Any = original.get_submodule(name).weight
            by_kind.setdefault(kind, WeightError(kind)).add(own, weight.dequantize().to(own.device))
    return list(by_kind.values())


def weight_bytes(model: nn.Module, number_bytes: int) -> int:
    """Return the bytes of a model's weights; those that are not quantized count `number_bytes` each."""
    size = sum(parameter.numel() for parameter in model.parameters()) * number_bytes
    # By identity: token embeddings and output head may share a weight.
    weights = {id(weight): weight for module in model.modules() if (weight := _quantized_weight(module)) is not None}
    for weight in weights.values():
        tensors = (weight.codes, weight.scales, weight.zeros)
        size += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return size


def _quantized_weight(module: nn.Module) -> QuantizedWeight | None:
    weight: Any = getattr(module, "weight", None)
    return weight if isinstance(weight, QuantizedWeight) else None


# Maximum tokens of a window of the text, and of the text that is read: more take long and change the figures little.
_WINDOW_TOKENS, _TEXT_TOKENS = 512, 16_384
# Tokens of the text's beginning that are continued, and of the continuation.
_PROMPT_TOKENS, _ANSWER_TOKENS = 16, 48


def quantization_report(
    model: str, quantized: str, text: str, device: str = "cpu", kv_cache_dtype: str = ""
) -> dict[str, Any]:
    """Compare a model with its quantized form, which alone has a KV cache of `kv_cache_dtype`.

    Raises ArtifactError, ModelUnusableError.
    """
    codec = TextCodec(Path(model))
    ids = _read_text(Path(text), codec)
    pair = load_pair(model, quantized, device)
    window = min(_WINDOW_TOKENS, pair.original.context_length)
    figures = _sizes(model, pair, kv_cache_dtype)
    tokens = max(window, _PROMPT_TOKENS + _ANSWER_TOKENS)
    original = EvaluatedModel(pair.original, rows=1, tokens=tokens)
    other = EvaluatedModel(pair.quantized, rows=1, tokens=tokens, kv_cache_dtype=kv_cache_dtype)
    differences = compare_text(original, other, ids, window)
    before, after = differences.perplexities
    prompt = ids[:_PROMPT_TOKENS]
    ends = pair.original.end_token_ids
    answers = [each.answers([prompt], _ANSWER_TOKENS, greedy, ends)[0] for each in (original, other)]
    return figures | {
        "text": {
            "tokens": differences.tokens,
            "perplexity": {"original": before, "quantized": after},
            "agreement": differences.agreement,
            "mean_kl": differences.mean_kl,
            "max_kl": differences.max_kl,
        },
        "continuation": {
            "prompt": codec.decode(prompt),
            "original": codec.decode(answers[0]),
            "quantized": codec.decode(answers[1]),
        },
    }


def compare_text(original: EvaluatedModel, quantized: EvaluatedModel, ids: Ids, window: int) -> Differences:
    """Compare the models' next tokens over a text, window by window."""
    differences = Differences()
    for start in range(0, len(ids) - 1, window):
        part = ids[start : start + window + 1]
        following = torch.tensor(part[1:])
        compared = 0
        for own, other in zip(original.logits(part[:-1]), quantized.logits(part[:-1]), strict=True):
            differences.add(own, other, following[compared : compared + len(own)])
            compared += len(own)
    return differences


def greedy(logits: Tensor) -> Tensor:
    """Return the best token of each row of logits."""
    return logits.argmax(-1)


def _read_text(path: Path, codec: TextCodec) -> Ids:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(str(path), f"cannot be read as UTF-8 text: {error}") from error
    ids = codec.encode(text)[:_TEXT_TOKENS]
    if len(ids) < 2:
        raise ArtifactError(str(path), "has less than two tokens, so that there is nothing to predict")
    return ids


def _sizes(model: str, pair: ModelPair, kv_cache_dtype: str) -> dict[str, Any]:
    stored = [tensor for _, tensor in read_checkpoint(Path(model)).tensors.values()]
    number_bytes = {"F32": 4, "BF16": 2, "F16": 2}.get(stored[0].dtype, 4)
    return {
        "weight_bytes": {
            "original": weight_bytes(pair.original.module, number_bytes),
            "quantized": weight_bytes(pair.quantized.module, number_bytes),
        },
        "kv_bytes_per_token": {
            "original": pair.original.kv.token_bytes(number_bytes, ""),
            "quantized": pair.quantized.kv.token_bytes(number_bytes, kv_cache_dtype),
        },
        "weight_errors": [
            {
                "kind": error.kind,
                "layers": error.layers,
                "weights": error.weights,
                "max": error.max_error,
                "mean": error.mean_error,
                "relative": error.relative_error,
            }
            for error in weight_errors(pair.original.module, pair.quantized.module)
        ],
    }
