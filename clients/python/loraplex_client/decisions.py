"""Decisions: the probabilities of the answers to questions about one input, which nothing is generated for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from loraplex.inference.v1 import inference_pb2

from loraplex_client.errors import InvalidRequestError, RateLimit
from loraplex_client.generation import Usage


@dataclass(frozen=True)
class Question:
    """A question about an input: whether a statement is true, which of `choices`, or which of `levels`, lowest first.

    Choices and levels are texts, or texts with what they mean. `yes` and `no` say what these mean for a statement.
    """

    instructions: str
    choices: Sequence[str] | Mapping[str, str] = ()
    levels: Sequence[str] | Mapping[str, str] = ()
    yes: str = ""
    no: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels that the answer has probabilities of."""
        return tuple(self.choices) or tuple(self.levels) or ("yes", "no")

    def message(self, index: int) -> inference_pb2.Question:
        """Return the message of the question with this number. Raises InvalidRequestError."""
        if bool(self.choices) + bool(self.levels) + bool(self.yes or self.no) > 1:
            name = f"questions[{index}]"
            raise InvalidRequestError(f"{name}: give choices, levels, or what yes and no mean", field=name)
        question = inference_pb2.Question(instructions=self.instructions)
        if self.choices:
            question.choice.options.extend(_options(self.choices))
        elif self.levels:
            question.score.options.extend(_options(self.levels))
        else:
            question.predicate.CopyFrom(inference_pb2.Predicate(yes=self.yes, no=self.no))
        return question


def _options(values: Sequence[str] | Mapping[str, str]) -> Iterable[inference_pb2.Option]:
    meanings = values if isinstance(values, Mapping) else dict.fromkeys(values, "")
    if len(meanings) < len(values):  # the server names the one that is there twice
        return (inference_pb2.Option(value=value) for value in values)
    return (inference_pb2.Option(value=value, description=meaning) for value, meaning in meanings.items())


@dataclass(frozen=True)
class Decision:
    """The probabilities of a question's labels, whose sum is 1, in their order.

    `label_mass` is the probability that the model gives all of them together. `scored_labels` were scored as
    continuations, since they have more than one token; the others were read from the first position. `logprobs` are the
    model's own of the labels, in nats; a temperature changes neither them nor `label_mass`.
    """

    probabilities: Mapping[str, float]
    label_mass: float
    scored_labels: int = 0
    logprobs: Mapping[str, float] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """Return the likeliest label."""
        return max(self.probabilities, key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """Return 1 where one label has all of the probability, and 0 where all have the same: 1 - entropy / log n."""
        entropy = -sum(share * math.log(share) for share in self.probabilities.values() if share > 0)
        return max(0.0, 1 - entropy / math.log(len(self.probabilities)))

    @property
    def score(self) -> float:
        """Return the mean of the levels' numbers, which begin at 0, by their probabilities."""
        return sum(level * share for level, share in enumerate(self.probabilities.values()))


@dataclass(frozen=True)
class Decisions:
    """The decisions of a call, in the order of its questions; see Generation for the other fields.

    `temperature` is that of the adapter's calibration; None: the probabilities are the model's own.
    """

    decisions: tuple[Decision, ...]
    usage: Usage
    adapter_revision: str
    request_id: str
    adapters: tuple[tuple[str, float], ...] = ()
    rate_limits: Mapping[str, RateLimit] = field(default_factory=dict)
    temperature: float | None = None


def decisions_of(response: inference_pb2.DecideResponse, questions: Sequence[Question]) -> Decisions:
    """Return what a response has."""
    return Decisions(
        decisions=tuple(
            Decision(
                dict(zip(asked.labels, one.probabilities, strict=True)),
                one.label_mass,
                one.scored_labels,
                dict(zip(asked.labels, one.logprobs, strict=True)),
            )
            for asked, one in zip(questions, response.decisions, strict=True)
        ),
        usage=Usage(response.usage.prompt_tokens, response.usage.cached_tokens, response.usage.completion_tokens),
        adapter_revision=response.adapter_revision,
        request_id=response.request_id,
        adapters=tuple((part.adapter, part.weight) for part in response.adapters),
        temperature=response.temperature if response.HasField("temperature") else None,
    )
