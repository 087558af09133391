"""The vector that a text is encoded to: the fields of a request, which job, sequence and messages carry alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Task = Literal["embed", "classify"]
# Pooling of hidden states; empty: the model's own. "cls" is the first token's hidden state, "last" the last token's.
Pooling = Literal["", "cls", "mean", "last"]


@dataclass(frozen=True, slots=True)
class Encode:
    """The vector that a sequence asks for instead of an answer.

    "embed": the pooled hidden state of the last layer; "classify": the logits of the classifier's labels, which has its
    own pooling.
    """

    task: Task
    pooling: Pooling = ""
    # Number of tokens at the prompt's end that are the second text of a pair (token type 1); the others have type 0.
    pair_tokens: int = 0
