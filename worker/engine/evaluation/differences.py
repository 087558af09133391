"""The differences of two models' next-token distributions, added up over pieces of text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from artifacts import ArtifactError

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
