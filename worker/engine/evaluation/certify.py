"""The figures of an adapter's certificate: its answers on the quantized base against those on the original base.

prompts ──▶ greedy answers of the adapter on the original ──▶ both models read prompt and answer ──▶ figures
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from artifacts import ArtifactError, MismatchError
from artifacts.checkpoint import read_small_file
from artifacts.json_object import parse_object
from artifacts.peft_config import CONFIG_FILE, PROMPTS_FIELD, parse_peft_config, parse_prompts
from artifacts.revision import Figures
from worker.engine.evaluation.differences import Differences
from worker.engine.evaluation.logits import EvaluatedModel, Ids
from worker.engine.evaluation.pair import ModelPair, TextCodec, load_pair
from worker.engine.evaluation.report import greedy

# Number of prompts that are drawn, and of their tokens.
_DRAWN, _DRAWN_TOKENS = 16, 24
_SEED = 0
# Maximum tokens of a prompt that comes with an adapter (its last ones count), and of an answer.
_PROMPT_TOKENS, _ANSWER_TOKENS = 512, 32
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
    tokens = longest + _ANSWER_TOKENS
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
    prompts = [codec.encode(text)[-_PROMPT_TOKENS:] for text in texts]
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
        for prompt, answer in zip(some, original.answers(some, _ANSWER_TOKENS, greedy, ends), strict=True):
            ids, first = (prompt + answer)[:-1], len(prompt) - 1
            own, other = (torch.cat(list(each.logits(ids, first))) for each in (original, quantized))
            differences.add(own, other, torch.tensor(answer))
    return differences
