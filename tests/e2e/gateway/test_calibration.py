"""Calibrated decisions: `loraplex adapters calibrate` fits a temperature, the store keeps it, every door tells it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from loraplex.cli.calibration import calibrate
from loraplex.cli.terminal import CommandError
from loraplex_client import AsyncStoreClient, Calibration, Decision, FailedPreconditionError, Question
from tests.e2e.conftest import TENANT, Cluster
from tests.e2e.gateway.conftest import Eventually
from tests.e2e.gateway.test_decisions import post

pytestmark = pytest.mark.asyncio(loop_scope="package")
QUESTION = Question("Which team?", choices=["a", "b", "shipping"])
TEXTS = [f"letter {number}" for number in range(40)]
UNKNOWN = r"has no calibration; run `loraplex adapters calibrate`"


@dataclass(frozen=True)
class Calibrated:
    """What the model says of TEXTS itself, and the calibration of adapter b."""

    raw: Sequence[Decision]
    kept: Calibration


def write_labels(path: Path, labels: Sequence[str]) -> Path:
    question = {"instructions": QUESTION.instructions, "choices": [*QUESTION.choices]}
    lines = [{"prompt": text, "question": question, "label": label} for text, label in zip(TEXTS, labels, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


async def run_command(cluster: Cluster, file: Path) -> None:
    await asyncio.to_thread(calibrate, "b", file, TENANT, cluster.local.router, cluster.local.store, as_json=True)


async def kept_of(cluster: Cluster) -> tuple[Calibration, ...]:
    async with AsyncStoreClient(cluster.local.store, TENANT) as store:
        return (await store.get("b"))[1].calibrations


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def calibrated(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Calibrated]:
    raw = [(await cluster.client.decide(text, [QUESTION], adapter_id="b")).decisions[0] for text in TEXTS]
    with pytest.raises(FailedPreconditionError, match=UNKNOWN):
        await cluster.client.decide(TEXTS[0], [QUESTION], adapter_id="b", calibrated=True)
    # Every fourth label is the least likely one: a temperature above 0 is best.
    labels = [one.best if at % 4 else min(one.logprobs, key=one.logprobs.__getitem__) for at, one in enumerate(raw)]
    await run_command(cluster, write_labels(tmp_path_factory.mktemp("labels") / "labelled.jsonl", labels))
    (kept,) = await kept_of(cluster)
    yield Calibrated(raw, kept)


async def test_a_decision_has_the_temperature_of_its_revision(
    cluster: Cluster, calibrated: Calibrated, eventually: Eventually
) -> None:
    kept = calibrated.kept
    assert (kept.questions, kept.quantization) == (40, "")
    assert kept.nll_after < kept.nll_before
    assert 0.05 < kept.temperature < 20

    async def is_known() -> bool:
        try:
            await cluster.client.decide(TEXTS[0], [QUESTION], adapter_id="b", calibrated=True)
        except FailedPreconditionError:
            return False
        return True

    await eventually(is_known)  # routers look for changes once a second
    for number, raw in enumerate(calibrated.raw[:4]):
        own = await cluster.client.decide(TEXTS[number], [QUESTION], adapter_id="b", calibrated=True)
        (decision,) = own.decisions
        assert own.temperature == kept.temperature
        assert (decision.logprobs, decision.label_mass) == (raw.logprobs, raw.label_mass)
        powers = {label: share ** (1 / kept.temperature) for label, share in raw.probabilities.items()}
        shares = {label: power / sum(powers.values()) for label, power in powers.items()}
        assert decision.probabilities == pytest.approx(shares, abs=1e-12)
    with pytest.raises(FailedPreconditionError, match=UNKNOWN):
        await cluster.client.decide(TEXTS[0], [QUESTION], adapter_id="c", calibrated=True)
    await eventually(cluster.idle)


async def test_http_tells_the_temperature(
    cluster: Cluster, client: openai.AsyncOpenAI, calibrated: Calibrated, eventually: Eventually
) -> None:
    values: Any = [{"value": value} for value in QUESTION.choices]
    asked: Any = [{"type": "choice", "instructions": QUESTION.instructions, "choices": values}]

    async def is_known() -> bool:
        try:
            await client.decisions.create(model="b", input="x", questions=asked, extra_body={"calibrated": True})
        except openai.BadRequestError:
            return False
        return True

    await eventually(is_known)  # the gateway calls another router
    chat = [{"role": "user", "content": TEXTS[1]}]
    own = await cluster.client.decide(None, [QUESTION], messages=chat, adapter_id="b", calibrated=True)
    shares = own.decisions[0].probabilities
    told = await client.decisions.create(model="b", input=TEXTS[1], questions=asked, extra_body={"calibrated": True})
    assert told.answers[0].type == "choice"
    assert [one.probability for one in told.answers[0].probabilities] == [*shares.values()]
    assert told.model_dump()["temperature"] == own.temperature == calibrated.kept.temperature
    named: Any = {"team": {"type": "choice", "instructions": QUESTION.instructions}}
    named["team"]["criteria"] = dict.fromkeys(QUESTION.choices)
    _, body = await post(cluster, "/v1/systemone", model="b", state=TEXTS[1], questions=named, calibrated=True)
    assert (body["answers"]["team"]["probabilities"], body["temperature"]) == (shares, own.temperature)
    with pytest.raises(openai.BadRequestError, match="has no calibration"):
        await client.decisions.create(model="c", input="x", questions=asked, extra_body={"calibrated": True})
    await eventually(cluster.idle)


async def test_a_fit_without_an_end_is_refused_and_the_former_calibration_stays(
    cluster: Cluster, calibrated: Calibrated, tmp_path: Path
) -> None:
    best = [one.best for one in calibrated.raw]
    with pytest.raises(CommandError, match=r"answers 40 of 40 right and no temperature above 0\.05 is best"):
        await run_command(cluster, write_labels(tmp_path / "right.jsonl", best))
    worst = [min(one.logprobs, key=one.logprobs.__getitem__) for one in calibrated.raw]
    with pytest.raises(CommandError, match="the right labels are no likelier than the others"):
        await run_command(cluster, write_labels(tmp_path / "wrong.jsonl", worst))
    assert await kept_of(cluster) == (calibrated.kept,)
