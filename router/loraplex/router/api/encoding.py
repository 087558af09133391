"""Conversion of the messages of Embed and Classify, with every check that needs only the message."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loraplex.inference.v1 import inference_pb2 as pb

from loraplex.contracts.options import Pooling, Task
from loraplex.router.api.convert import check_priority, read_adapters, read_request_id
from loraplex.router.catalog.adapters import Classifier
from loraplex.router.generation.unary_calls import Vector
from loraplex.router.request import EncodeInput, EncodeRequest, Summary, TextPair
from loraplex.runtime.rpc.errors import InvalidField

# Maximum texts of a call: vectors of 8,192 numbers then take half of a message.
INPUTS = 64
_POOLINGS: dict[int, Pooling] = {
    pb.POOLING_UNSPECIFIED: "",
    pb.POOLING_CLS: "cls",
    pb.POOLING_MEAN: "mean",
    pb.POOLING_LAST: "last",
}


def read_embed(request: pb.EmbedRequest, tenant: str) -> EncodeRequest:
    """Return what an Embed call asks for. Raises InvalidField."""
    pooling = _POOLINGS.get(request.pooling)
    if pooling is None:
        raise InvalidField("pooling", f"{request.pooling} is not one of POOLING_CLS, POOLING_MEAN and POOLING_LAST")
    return _read(request.spec, tenant, "embed", pooling)


def read_classify(request: pb.ClassifyRequest, tenant: str) -> EncodeRequest:
    """Return what a Classify call asks for. Raises InvalidField."""
    if request.spec.adapters:
        raise InvalidField("adapters", "a sum of adapters has no labels; give one adapter in `adapter`")
    return _read(request.spec, tenant, "classify", "")


def _read(spec: pb.EncodeSpec, tenant: str, task: Task, pooling: Pooling) -> EncodeRequest:
    if not 1 <= len(spec.inputs) <= INPUTS:
        raise InvalidField("inputs", f"{len(spec.inputs)} texts; give 1 to {INPUTS}")
    check_priority(spec.priority)
    read = [_read_input(index, message) for index, message in enumerate(spec.inputs)]
    return EncodeRequest(
        tenant=tenant,
        task=task,
        inputs=tuple(message for message, _ in read),
        fields=tuple(field for _, field in read),
        pooling=pooling,
        request_id=read_request_id(spec.request_id),
        model=spec.model,
        adapter=spec.adapter,
        adapters=read_adapters(spec),
        truncate=spec.truncate,
        priority=spec.priority,
    )


def _read_input(index: int, message: pb.EncodeInput) -> tuple[EncodeInput, str]:
    field = f"inputs[{index}]"
    match message.WhichOneof("input"):
        case "text" if message.text:
            return message.text, f"{field}.text"
        case "pair" if message.pair.first and message.pair.second:
            return TextPair(message.pair.first, message.pair.second), f"{field}.pair"
        case "pair":
            raise InvalidField(f"{field}.pair.{'second' if message.pair.first else 'first'}", "is empty")
        case "token_ids" if message.token_ids.ids:
            return tuple(message.token_ids.ids), f"{field}.token_ids"
        case None:
            raise InvalidField(field, "give one of text, pair and token_ids")
        case kind:
            raise InvalidField(f"{field}.{kind}", "is empty")


def write_embedding(vector: Vector, *, normalize: bool) -> pb.Embedding:
    """Convert the vector of a text."""
    values = normalized(vector.values) if normalize else vector.values
    return pb.Embedding(values=values, prompt_tokens=vector.prompt_tokens)


def write_classification(vector: Vector) -> tuple[pb.Classification, Sequence[str]]:
    """Convert the logits of a text; return it with the labels that they stand for."""
    labels = vector.classifier.labels_of(len(vector.values))
    likeliest = max(range(len(labels)), key=vector.values.__getitem__)
    classification = pb.Classification(
        label=labels[likeliest],
        probabilities=probabilities(vector.values, vector.classifier),
        logits=vector.values,
        prompt_tokens=vector.prompt_tokens,
    )
    return classification, labels


def write_encode_summary(summary: Summary) -> pb.EncodeSummary:
    """Convert the summary of a call."""
    return pb.EncodeSummary(
        adapter_revision=summary.adapter_revision,
        adapters=[pb.WeightedAdapter(adapter=part.adapter, weight=part.weight) for part in summary.adapters],
        usage=pb.Usage(prompt_tokens=summary.prompt_tokens, cached_tokens=summary.cached_tokens),
        request_id=summary.request_id,
        continuations=summary.continuations,
        timings=pb.Timings(queue=summary.queue_s, adapter=summary.adapter_s, ttft=summary.ttft_s),
    )


def normalized(values: Sequence[float]) -> Sequence[float]:
    """Return a vector scaled to the Euclidean length 1; one of zeros stays."""
    length = math.hypot(*values)
    return [value / length for value in values] if length else values


def probabilities(logits: Sequence[float], classifier: Classifier) -> Sequence[float]:
    """Return the probability of each label; of a regression its values."""
    if classifier.problem_type == "regression":
        return logits
    if len(logits) == 1 or classifier.problem_type == "multi_label_classification":
        return [logistic(logit) for logit in logits]
    largest = max(logits)
    powers = [math.exp(logit - largest) for logit in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]


def logistic(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)), by an exponent that is never positive: no overflow."""
    power = math.exp(-abs(logit))
    return 1 / (1 + power) if logit >= 0 else power / (1 + power)
