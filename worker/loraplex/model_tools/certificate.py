"""Measures an adapter on a quantized base against the original base, for its certificate.

its own prompts    whole greedy answers on both: how many are equal, and right where the prompts have expected answers
drawn prompts      the next tokens of both, over the greedy answers on the original
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from loraplex.contracts.artifacts import ArtifactError, MismatchError, parse_object
from loraplex.contracts.artifacts.activation import INVOCATION_FIELD
from loraplex.contracts.artifacts.added_tokens import eos_token
from loraplex.contracts.artifacts.checkpoint import read_small_file
from loraplex.contracts.artifacts.fitness import PROMPTS_FIELD, Figures, Prompt, is_right, parse_prompts
from loraplex.contracts.artifacts.peft_config import (
    CHAT_FIELD,
    CONFIG_FILE,
    ChatSettings,
    parse_chat_settings,
    parse_peft_config,
)
from loraplex.model_tools.calibration import read_tokenizer
from loraplex.model_tools.report import (
    Differences,
    EvaluatedModel,
    Ids,
    ModelPair,
    TextCodec,
    greedy,
    load_pair,
)

# Number of prompts that are drawn, and of their tokens and the answers'.
_DRAWN, _DRAWN_TOKENS, _DRAWN_ANSWER_TOKENS = 16, 24, 32
_SEED = 0
# Maximum tokens of an answer to a prompt of the adapter, or this many more than the longest expected one has.
_ANSWER_TOKENS, _MORE_TOKENS = 64, 16
# Maximum number of prompts that are answered at once, and of their tokens, which take memory.
_ROWS, _TOKENS = 16, 8192

# Called with what is done, and how much there is to do.
Progress = Callable[[int, int], None]


def certify(
    model: str, quantized: str, adapter: str, device: str = "cpu", progress: Progress = lambda done, of: None
) -> Figures:
    """Measure the adapter in directory `adapter`. Raises ArtifactError, ModelUnusableError."""
    data = read_small_file(Path(adapter) / CONFIG_FILE)
    peft, config = parse_peft_config(data), parse_object(data, CONFIG_FILE)
    if config.get("task_type") == "SEQ_CLS":
        raise MismatchError("task_type", "'SEQ_CLS' has no certificate: answers are compared, and it gives none")
    if peft.invocation:
        raise MismatchError(INVOCATION_FIELD, "an activated adapter has no certificate: drawn prompts do not invoke it")
    own = parse_prompts(config.get(PROMPTS_FIELD))
    answer_tokens, prompts, codec = _DRAWN_ANSWER_TOKENS, [], None
    if own:
        codec = TextCodec(Path(model), peft.added_tokens)
        settings, eos = parse_chat_settings(config.get(CHAT_FIELD)), eos_token(peft.end_tokens)
        prompts = _tokenize(own, codec, Path(model), settings, eos)
        expected = max(len(codec.encode(prompt.answer)) for prompt in own)
        answer_tokens = max(_ANSWER_TOKENS, expected + _MORE_TOKENS)
    pair = load_pair(model, quantized, device)
    tokens = max(map(len, prompts), default=_DRAWN_TOKENS) + answer_tokens
    if tokens > pair.original.context_length:
        raise ArtifactError("model", f"its context of {pair.original.context_length} is shorter than {tokens} tokens")
    rows = max(1, min(_ROWS, _TOKENS // tokens))
    models = [
        EvaluatedModel(loaded, rows=rows, tokens=tokens, max_rank=peft.max_rank)
        for loaded in (pair.original, pair.quantized)
    ]
    prompts = prompts or _draw(models[0], pair)
    for each in models:
        each.use_adapter(adapter)
    answers: tuple[list[Ids], list[Ids]] = ([], [])
    differences = Differences()
    ends = pair.original.end_token_ids.union(codec.end_ids(peft.end_tokens) if codec else ())
    for start in range(0, len(prompts), rows):
        some = prompts[start : start + rows]
        # Of drawn prompts the quantized model's own answers do not count.
        for each, given in zip(models if own else models[:1], answers, strict=False):
            given.extend(each.answers(some, answer_tokens, greedy, ends))
        _compare(models, some, answers[0][start:], differences)
        progress(start + len(some), len(prompts))
    right = [0 if codec is None else _count_right(own, ids, codec) for ids in answers]
    same = sum(first == second for first, second in zip(*answers, strict=True)) if own else None
    return Figures(
        prompts=len(prompts),
        drawn=not own,
        tokens=differences.tokens,
        agreement=differences.agreement,
        mean_kl=differences.mean_kl,
        max_kl=differences.max_kl,
        same_answers=same,
        expected_answers=sum(bool(prompt.answer) for prompt in own),
        right_original=right[0],
        right_quantized=right[1],
    )


def _tokenize(prompts: Sequence[Prompt], codec: TextCodec, model: Path, settings: ChatSettings, eos: str) -> list[Ids]:
    """Return the ids of prompts, as routers send them to the model. Raises ArtifactError."""
    tokenizer: Any = None
    tokenized = []
    for index, prompt in enumerate(prompts):
        if prompt.messages and tokenizer is None:
            tokenizer = read_tokenizer(model)
            tokenizer.eos_token = eos or tokenizer.eos_token
        if prompt.messages:
            text = _render(f"{PROMPTS_FIELD}[{index}].messages", prompt, tokenizer, settings)
            tokenized.append(codec.encode(text, add_special_tokens=False))
        else:
            tokenized.append(codec.encode(prompt.text))
    if not all(tokenized):
        raise ArtifactError(f"{PROMPTS_FIELD}[{tokenized.index(())}]", "has no tokens")
    return tokenized


def _render(field: str, prompt: Prompt, tokenizer: Any, adapter: ChatSettings) -> str:
    """Return the text of a chat by the adapter's template and system prompt, or else the model's own."""
    own = parse_chat_settings(tokenizer.init_kwargs.get(CHAT_FIELD))
    system, messages = adapter.system_prompt or own.system_prompt, list(prompt.messages)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    template = adapter.template or own.template or None
    try:
        return str(
            tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
        )
    except Exception as error:  # templates raise whatever they like, and a model may have none
        raise ArtifactError(field, f"cannot be rendered by the chat template: {error}") from error


def _count_right(prompts: Sequence[Prompt], answers: Sequence[Ids], codec: TextCodec) -> int:
    pairs = zip(prompts, answers, strict=True)
    return sum(bool(prompt.answer) and is_right(codec.decode(ids), prompt.answer) for prompt, ids in pairs)


def _draw(base: EvaluatedModel, pair: ModelPair) -> list[Ids]:
    """Draw prompts from the base without an adapter, at temperature 1, the same ones every time."""
    generator = torch.Generator().manual_seed(_SEED)

    def sample(logits: torch.Tensor) -> torch.Tensor:
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
    models: Sequence[EvaluatedModel], prompts: Sequence[Ids], answers: Sequence[Ids], differences: Differences
) -> None:
    """Add how the models differ after each token of the original's answers."""
    for prompt, answer in zip(prompts, answers, strict=True):
        ids, first = (prompt + answer)[:-1], len(prompt) - 1
        own, other = (torch.cat(list(each.logits(ids, first))) for each in models)
        differences.add(own, other, torch.tensor(answer))
