"""The report of a quantized model: its size, the error of its weights, and what that does to a text.

perplexity and divergence   over the text, in windows of the context, each from an empty context on
before and after            greedy continuations of the text's beginning
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from artifacts import ArtifactError, MismatchError
from artifacts.checkpoint import read_checkpoint, read_small_file
from artifacts.json_object import parse_object
from artifacts.peft_config import CONFIG_FILE, PROMPTS_FIELD, parse_peft_config, parse_prompts
from artifacts.revision import Figures
from worker.engine.evaluation.logits import Differences, EvaluatedModel, Ids, ModelPair, TextCodec, load_pair
from worker.engine.quantized.weight import QuantizedWeight


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


# Number of prompts that are drawn, and of their tokens.
_DRAWN, _DRAWN_TOKENS = 16, 24
_SEED = 0
# Maximum tokens of a prompt that comes with an adapter (its last ones count), and of an answer.
_CERTIFIED_PROMPT_TOKENS, _CERTIFIED_ANSWER_TOKENS = 512, 32
# Number of prompts that are answered at once.
_ROWS = 16


def certify(model: str, quantized: str, adapter: str, device: str = "cpu") -> Figures:
    """Measure the adapter in directory `adapter`. Raises ArtifactError, ModelUnusableError."""
    data = read_small_file(Path(adapter) / CONFIG_FILE)
    rank, config = parse_peft_config(data).max_rank, parse_object(data, CONFIG_FILE)
    if config.get("task_type") == "SEQ_CLS":
        raise MismatchError("task_type", "'SEQ_CLS' has no certificate: answers are compared, and it gives none")
    texts = parse_prompts(config.get(PROMPTS_FIELD))
    own = [] if not texts else _encode(texts, TextCodec(Path(model)))
    longest = max(map(len, own), default=_DRAWN_TOKENS)
    pair = load_pair(model, quantized, device)
    tokens = longest + _CERTIFIED_ANSWER_TOKENS
    if tokens > pair.original.context_length:
        raise ArtifactError("model", f"its context of {pair.original.context_length} is shorter than {tokens} tokens")
    original, other = (
        EvaluatedModel(loaded, rows=_ROWS, tokens=tokens, max_rank=rank) for loaded in (pair.original, pair.quantized)
    )
    prompts = own or _draw(original, pair)
    for each in (original, other):
        each.use_adapter(adapter)
    differences = _compare(original, other, prompts, pair.original.end_token_ids)
    return Figures(
        prompts=len(prompts),
        drawn=not own,
        tokens=differences.tokens,
        agreement=differences.agreement,
        mean_kl=differences.mean_kl,
        max_kl=differences.max_kl,
    )


def _encode(texts: tuple[str, ...], codec: TextCodec) -> list[Ids]:
    prompts = [codec.encode(text)[-_CERTIFIED_PROMPT_TOKENS:] for text in texts]
    if not all(prompts):
        raise ArtifactError(f"{PROMPTS_FIELD}[{prompts.index(())}]", "has no tokens")
    return prompts


def _draw(base: EvaluatedModel, pair: ModelPair) -> list[Ids]:
    """Draw prompts from the base without an adapter, at temperature 1, the same ones every time."""
    generator = torch.Generator().manual_seed(_SEED)

    def sample(logits: Tensor) -> Tensor:
        return torch.multinomial(logits.cpu().softmax(-1), 1, generator=generator)[:, 0]

    begin = pair.original.module.config.bos_token_id
    if isinstance(begin, int):
        starts = [begin] * _DRAWN
    else:
        starts = torch.randint(pair.original.vocab_size, (_DRAWN,), generator=generator).tolist()
    prompts = [(start,) for start in starts]
    drawn = base.answers(prompts, _DRAWN_TOKENS - 1, sample, frozenset())
    return [prompt + answer for prompt, answer in zip(prompts, drawn, strict=True)]


def _compare(
    original: EvaluatedModel, quantized: EvaluatedModel, prompts: list[Ids], ends: frozenset[int]
) -> Differences:
    differences = Differences()
    for start in range(0, len(prompts), _ROWS):
        some = prompts[start : start + _ROWS]
        for prompt, answer in zip(some, original.answers(some, _CERTIFIED_ANSWER_TOKENS, greedy, ends), strict=True):
            ids, first = (prompt + answer)[:-1], len(prompt) - 1
            own, other = (torch.cat(list(each.logits(ids, first))) for each in (original, quantized))
            differences.add(own, other, torch.tensor(answer))
    return differences
