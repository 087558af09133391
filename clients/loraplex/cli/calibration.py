"""`loraplex adapters calibrate`: fits the temperature of an adapter's decisions on questions of known answer.

    labelled questions ──▶ log probabilities of their labels ──▶ one temperature ──▶ a statement about the revision

A temperature T divides the log probabilities before the softmax; the one with the least mean negative log likelihood of
the right labels is kept (Guo et al. 2017, https://arxiv.org/abs/1706.04599).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli.decide import question_of, read_json_lines
from loraplex.cli.options import (
    ROUTER,
    STORE,
    TENANT,
    JsonOption,
    NameArgument,
    RouterOption,
    StoreOption,
    TenantOption,
)
from loraplex.cli.service import explained, store_client
from loraplex.cli.terminal import Activity, Columns, CommandError, print_json, print_table

if TYPE_CHECKING:
    from loraplex_client import Calibration, Decision, Question, Revision

# Bins of equal width of the expected calibration error (Naeini et al. 2015).
BINS = 15
# Minimum number of questions: fewer say nothing of a share.
LEAST_QUESTIONS = 10
# The least and the largest temperature. Beyond them probabilities are 0 and 1, or all the same: not what was measured,
# but where a fit goes that has no minimum.
LEAST_TEMPERATURE, LARGEST_TEMPERATURE = 0.05, 20.0
# Steps of the bisection, which halve the interval: to the last bit of a double.
_HALVINGS = 60
# Maximum number of calls at once, and of questions of a call.
_CALLS, _QUESTIONS = 8, 400


@dataclass(frozen=True)
class Example:
    """The log probabilities of a question's labels, and the index of the right one."""

    logprobs: tuple[float, ...]
    right: int

    def probabilities(self, temperature: float) -> list[float]:
        """Return the probabilities of the labels at a temperature."""
        most = max(self.logprobs)
        shares = [math.exp((one - most) / temperature) for one in self.logprobs]
        total = sum(shares)
        return [share / total for share in shares]


def negative_log_likelihood(examples: Sequence[Example], temperature: float) -> float:
    """Return the mean negative log likelihood of the right labels, in nats."""
    total = 0.0
    for one in examples:
        scaled = [logprob / temperature for logprob in one.logprobs]
        most = max(scaled)
        total += most + math.log(sum(math.exp(each - most) for each in scaled)) - scaled[one.right]
    return max(0.0, total / len(examples))


def calibration_error(examples: Sequence[Example], temperature: float) -> float:
    """Return the expected calibration error: by how much the likeliest label's probability misses its accuracy.

    The mean over BINS bins of that probability, weighted by their examples (Naeini et al. 2015).
    """
    gaps = [0.0] * BINS
    for one in examples:
        shares = one.probabilities(temperature)
        confidence = max(shares)
        is_right = shares[one.right] == confidence
        gaps[min(BINS - 1, int(confidence * BINS))] += confidence - is_right
    return sum(map(abs, gaps)) / len(examples)


def check_count(questions: int) -> None:
    """Raise CommandError where there are too few questions."""
    if questions < LEAST_QUESTIONS:
        raise CommandError(f"--questions: {questions} labelled questions; give at least {LEAST_QUESTIONS}")


def fit_temperature(examples: Sequence[Example]) -> float:
    """Return the temperature with the least negative log likelihood. Raises CommandError where there is none.

    In 1/T the negative log likelihood is convex. Its slope, the mean of the expected log probability less the right
    label's, is bisected.
    """
    check_count(len(examples))

    def slope(temperature: float) -> float:
        total = 0.0
        for one in examples:
            expected = sum(map(float.__mul__, one.probabilities(temperature), one.logprobs))
            total += expected - one.logprobs[one.right]
        return total

    if slope(LEAST_TEMPERATURE) <= 0:
        right = sum(one.logprobs[one.right] == max(one.logprobs) for one in examples)
        raise CommandError(
            f"--questions: the adapter answers {right} of {len(examples)} right and no temperature above "
            f"{LEAST_TEMPERATURE:g} is best: the fit goes to 0; add questions that it gets wrong"
        )
    if slope(LARGEST_TEMPERATURE) >= 0:
        raise CommandError(
            f"--questions: the right labels are no likelier than the others: no temperature below "
            f"{LARGEST_TEMPERATURE:g} is best; see whether the labels fit the questions, or train the adapter"
        )
    low, high = 1 / LARGEST_TEMPERATURE, 1 / LEAST_TEMPERATURE
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(1 / middle) > 0 else (middle, high)
    return 2 / (low + high)


@dataclass(frozen=True)
class LabelledQuestion:
    """A question with its right label; `input` has the keywords of the call that asks it, as JSON."""

    input: str
    question: Question
    right: str


def read_labelled(path: Path) -> list[LabelledQuestion]:
    """Read a file of labelled questions. Raises CommandError that names the line."""
    read = []
    for where, value in read_json_lines(path, "--questions"):
        for name in value.keys() - {"prompt", "messages", "question", "label"}:
            raise CommandError(f"{where}.{name}: is not one of prompt, messages, question, label")
        if ("prompt" in value) == ("messages" in value):
            raise CommandError(f"{where}: give a prompt or messages")
        kind, words = (str, "a text") if "prompt" in value else (list, "a list")
        name = "prompt" if "prompt" in value else "messages"
        if not isinstance(value[name], kind):
            raise CommandError(f"{where}.{name}: is not {words}")
        question = question_of(f"{where}.question", value.get("question"))
        label = value.get("label")
        label = {True: "yes", False: "no"}[label] if isinstance(label, bool) else label
        if label not in question.labels:
            raise CommandError(f"{where}.label: {label!r} is not one of {', '.join(question.labels)}")
        read.append(LabelledQuestion(json.dumps({name: value[name]}), question, label))
    return read


def calibrate(
    name: NameArgument,
    questions: Annotated[
        Path, typer.Option(metavar="FILE", help="JSON lines with prompt or messages, question, and the right label.")
    ],
    tenant: TenantOption = TENANT,
    router: RouterOption = ROUTER,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Fit the temperature of an adapter's decisions on labelled questions, and store it with its effect.

    Decide gives the probabilities at this temperature to requests for calibrated ones. Other revisions need their own.

    A line of FILE: {"prompt": "Twice!", "question": {"instructions": "Team?", "choices": ["A", "B"]}, "label": "A"}

    Instead of prompt there may be messages; of choices levels, lowest first. A question that is a text is a statement,
    whose labels are yes and no.

    [bold]loraplex adapters calibrate triage --questions labelled.jsonl --tenant acme[/]
    """
    from loraplex_client import Calibration

    asked = read_labelled(questions)
    check_count(len(asked))
    with store_client(store, tenant) as client:
        _, revision = client.get(name)
        quantization = next((one.quantization for one in client.models() if one.name == revision.base_model), "")
        with Activity() as activity, explained("router", router):
            activity.step(f"asking {revision.name} {len(asked)} questions")
            examples = asyncio.run(_ask_all(router, tenant, revision, asked))
        temperature = fit_temperature(examples)
        before, after = (negative_log_likelihood(examples, each) for each in (1.0, temperature))
        calibration = client.calibrate(
            revision.name,
            Calibration(
                quantization=quantization,
                base_digest=revision.base_digest,
                temperature=temperature,
                questions=len(examples),
                ece_before=calibration_error(examples, 1.0),
                ece_after=calibration_error(examples, temperature),
                nll_before=before,
                nll_after=min(before, after),  # equal but for rounding where the best temperature is 1
            ),
        )
    if as_json:
        print_json({"revision": revision.name, **vars(calibration)})
    else:
        print_calibrations([(revision, [calibration])])


def print_calibrations(revisions: Iterable[tuple[Revision, Sequence[Calibration]]]) -> None:
    """Print the calibrations of revisions, if there are any."""
    columns: Columns = {
        "revision": lambda row: row["digest"][:19],
        "base": lambda row: row["quantization"] or "-",
        "temperature": lambda row: f"{row['temperature']:.4f}",
        "questions": "questions",
        "ECE": lambda row: f"{row['ece_before']:.4f} -> {row['ece_after']:.4f}",
        "NLL": lambda row: f"{row['nll_before']:.4f} -> {row['nll_after']:.4f}",
    }
    rows = [{"digest": revision.digest, **vars(one)} for revision, kept in revisions for one in kept]
    if rows:
        print_table(rows, columns)


async def _ask_all(router: str, tenant: str, revision: Revision, asked: Sequence[LabelledQuestion]) -> list[Example]:
    """Return the log probabilities of all questions' labels; those of one input are asked in one call."""
    from loraplex_client import AsyncClient

    together: dict[str, list[LabelledQuestion]] = {}
    for one in asked:
        together.setdefault(one.input, []).append(one)
    calls = [some[at : at + _QUESTIONS] for some in together.values() for at in range(0, len(some), _QUESTIONS)]
    adapter = revision.name.replace("/revisions/", "@")
    async with AsyncClient(router, tenant) as client:
        free = asyncio.Semaphore(_CALLS)

        async def ask(call: Sequence[LabelledQuestion]) -> Sequence[Decision]:
            options: dict[str, Any] = {"prompt": None, **json.loads(call[0].input)}
            async with free:
                answer = await client.decide(
                    options.pop("prompt"), [one.question for one in call], adapter_id=adapter, **options
                )
            return answer.decisions

        answers = await asyncio.gather(*map(ask, calls))
    return [
        Example(tuple(decision.logprobs.values()), one.question.labels.index(one.right))
        for call, decisions in zip(calls, answers, strict=True)
        for one, decision in zip(call, decisions, strict=True)
    ]
