"""Observes a pass of a few tokens through a model: its decoder layers' inputs, attention and results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from worker.engine.attention.paged import AttentionContext, LayerCall

# Number of tokens that the model computes.
_TOKENS = 5


@dataclass
class ObservedLayer:
    """A call of a decoder layer: its first argument, named arguments and result, and the attention in it."""

    module: Any
    hidden: Tensor
    named: dict[str, Any]
    out: Any = None
    attention: list[tuple[LayerCall, Tensor]] = field(default_factory=list)


class _Observer:
    """A step of random attention, which keeps what layers ask of it."""

    def __init__(self) -> None:
        self.calls: list[ObservedLayer] = []
        self._generator = torch.Generator().manual_seed(0)

    def attend(self, call: LayerCall) -> Tensor:
        """See StepAttention."""
        heads, dim = call.query.shape[1], call.value.shape[-1]
        attended = torch.randn(len(call.query), heads, dim, generator=self._generator).to(call.query.dtype)
        if self.calls:
            copied = replace(call, query=call.query.clone(), key=call.key.clone(), value=call.value.clone())
            self.calls[-1].attention.append((copied, attended))
        return attended


def observe_layers(model: Any, context: AttentionContext, length: int) -> list[ObservedLayer]:
    """Return the calls of the decoder layers in a pass of a few tokens, at positions from 0 to `length` - 1."""
    observer = _Observer()
    # The last ones too: some models multiply queries by what depends on how late they are.
    positions = torch.linspace(0, length - 1, _TOKENS).long()
    positions[1] = 1 % length
    ids = torch.randint(model.config.vocab_size, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    with context.during(observer), _watching(model, observer.calls):
        model(
            input_ids=ids,
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=torch.tensor([0]),
        )
    return observer.calls


@contextmanager
def _watching(model: Any, calls: list[ObservedLayer]) -> Iterator[None]:
    def before(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = arguments[0] if arguments else named["hidden_states"]
        calls.append(ObservedLayer(module, hidden, named))

    def after(module: nn.Module, arguments: Any, out: Any) -> None:
        calls[-1].out = out

    hooks = []
    for module in model.modules():
        if hasattr(module, "self_attn") and hasattr(module, "mlp"):
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def is_chain(calls: list[ObservedLayer]) -> bool:
    """Tell whether each layer takes the layer before's result as it is, and all take the same rotation."""
    embeddings = calls[0].named.get("position_embeddings")
    return all(call.named.get("position_embeddings") is embeddings for call in calls) and all(
        after.hidden is before.out for before, after in pairwise(calls)
    )
