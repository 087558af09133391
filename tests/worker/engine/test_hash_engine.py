"""The hash engine gives what its oracle says, whatever runs beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.contracts.options import Encode, FinishReason, SamplingParams, StoppingParams, TokenLogprobs
from loraplex.hash_engine import HashEngine
from loraplex.worker.engine_api import AdapterSource, EngineConfig, NewSequence, Output, SequenceRefusedError
from tests.hash_oracle import expected_ids, expected_vector

SPEC = "hash:?vocab=600&seed=3"
PROMPT = (1, 2, 300)
NOISE = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=11)
# Settings that change greedy answers too.
ADJUSTED = [
    SamplingParams(repetition_penalty=1.1),
    SamplingParams(frequency_penalty=1.1),
    SamplingParams(presence_penalty=1.1),
    SamplingParams(logit_bias=((3, 1.5),)),
    SamplingParams(logit_bias=((4, 1.5),)),
    SamplingParams(logit_bias=((3, 1.6),)),
]


class RunningEngine:
    """A hash engine and all it has put out."""

    def __init__(self, spec: str, blocks: int = 0) -> None:
        config = EngineConfig(spec, rows=4, kv_blocks=blocks, block_size=4, adapter_slots=2, max_rank=8, step_tokens=16)
        self._loaded = threading.Event()
        self.engine = HashEngine(config, self._loaded.set)

    def answers(self, *sequences: NewSequence) -> dict[str, tuple[tuple[int, ...], Output]]:
        """The ids and the last output of each."""
        for sequence in sequences:
            self.engine.add_sequence(sequence)
        ids: dict[str, list[int]] = {sequence.sequence_id: list(sequence.emitted_ids) for sequence in sequences}
        last: dict[str, Output] = {}
        while len(last) < len(ids):
            self._loaded.clear()
            if not self.engine.has_work():
                assert self._loaded.wait(60), "no work and no adapter on its way"
            for output in self.engine.step():
                assert output.offset == len(ids[output.sequence_id])
                ids[output.sequence_id] += output.token_ids
                if output.finish:
                    last[output.sequence_id] = output
        return {name: (tuple(ids[name]), last[name]) for name in ids}


@pytest.fixture(params=["", "&draft=0.7"])
def running(request: pytest.FixtureRequest) -> Iterator[RunningEngine]:
    running = RunningEngine(SPEC + request.param)
    yield running
    running.engine.close()


@pytest.fixture
def adapters(tmp_path: Path) -> list[AdapterSource]:
    sources = []
    for name in ("a", "b", "c"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "adapter_config.json").write_text("{}")
        (directory / "adapter_model.safetensors").write_bytes(b"any")
        sources.append(AdapterSource(f"sha256:{name}", str(directory)))
    return sources


def test_everything_that_matters_changes_the_answer() -> None:
    answers = [
        expected_ids(SPEC, PROMPT),
        expected_ids("hash:?vocab=600&seed=4", PROMPT),
        expected_ids(SPEC, (*PROMPT, 1)),
        expected_ids(SPEC, PROMPT, adapter_digest="sha256:a"),
        expected_ids(SPEC, PROMPT, choice=1),
        expected_ids(SPEC, PROMPT, sampling=NOISE),
        expected_ids(SPEC, PROMPT, sampling=replace(NOISE, temperature=0.8)),
        expected_ids(SPEC, PROMPT, sampling=replace(NOISE, top_k=21)),
        expected_ids(SPEC, PROMPT, sampling=replace(NOISE, top_p=0.91)),
        expected_ids(SPEC, PROMPT, sampling=replace(NOISE, seed=12)),
        expected_ids(SPEC, PROMPT, sampling=replace(NOISE, min_p=0.1)),
        expected_ids(SPEC, PROMPT, sampling=replace(NOISE, typical_p=0.5)),
        *(expected_ids(SPEC, PROMPT, sampling=sampling) for sampling in ADJUSTED),
        *(expected_ids(SPEC, PROMPT, sampling=replace(sampling, temperature=0.7)) for sampling in ADJUSTED),
    ]
    assert len(set(answers)) == len(answers)
    assert all(len(set(answer)) > 100 for answer in answers)


def test_greedy_answers_do_not_depend_on_what_shapes_the_noise() -> None:
    for sampling in (
        SamplingParams(seed=1),
        SamplingParams(top_k=3, top_p=0.5),
        SamplingParams(min_p=0.5, typical_p=0.5),
    ):
        assert expected_ids(SPEC, PROMPT, sampling=sampling) == expected_ids(SPEC, PROMPT)


@pytest.mark.parametrize("draft", [1.0, 0.7, 0.01])
def test_drafts_give_more_tokens_a_step_the_more_often_they_are_right(draft: float) -> None:
    running = RunningEngine(f"{SPEC}&draft={draft}")
    stopping = StoppingParams(max_tokens=100)
    for speculate in (True, False):
        (ids, _) = running.answers(NewSequence(f"{speculate}", PROMPT, stopping=stopping, speculate=speculate))[
            f"{speculate}"
        ]
        assert ids == expected_ids(SPEC, PROMPT, stopping=stopping)
    stats = running.engine.stats()
    running.engine.close()
    # Three rows of four are free: steps of four tokens, and the last one's of what is left.
    least, most = {1.0: (0.95, 1.0), 0.7: (0.4, 0.6), 0.01: (0.0, 0.05)}[draft]
    assert least * stats.drafted <= stats.accepted <= most * stats.drafted
    assert stats.steps == 200 - stats.accepted


def test_a_vector_is_the_one_output_of_a_sequence_that_asks_for_it(
    running: RunningEngine, adapters: list[AdapterSource]
) -> None:
    """Prompts longer than a step beside an answer; the second of each is in the prefix cache."""
    tasks = [Encode("embed"), Encode("embed", "cls"), Encode("embed", pair_tokens=2), Encode("classify")]
    asking = [
        NewSequence(f"{at}", (*range(20), at), adapter=adapter, stopping=StoppingParams(0), encode=encode)
        for adapter in (None, *adapters[:2])
        for at, encode in enumerate(tasks)
    ]
    asking = [replace(one, sequence_id=f"{at}") for at, one in enumerate([*asking, *asking])]
    answers = running.answers(NewSequence("answer", PROMPT, stopping=StoppingParams(max_tokens=30)), *asking)
    vectors = [answers[one.sequence_id][1].vector for one in asking]
    assert vectors == [
        expected_vector(SPEC, one.prompt_ids, one.encode, adapter_digest=one.adapter.digest if one.adapter else "")
        for one in asking
        if one.encode
    ]
    assert len(set(vectors)) == len(asking) / 2
    outputs = [answers[one.sequence_id] for one in asking]
    assert {(ids, last.finish, last.offset) for ids, last in outputs} == {((), FinishReason.LENGTH, 0)}
    assert any(last.cached_tokens for _, last in outputs)
    assert answers["answer"][0] == expected_ids(SPEC, PROMPT, stopping=StoppingParams(max_tokens=30))
    running.engine.check()
    for bad in (
        replace(asking[0], stopping=StoppingParams(1)),
        replace(asking[0], encode=Encode("embed", pair_tokens=99)),
    ):
        with pytest.raises(SequenceRefusedError, match="encode"):
            running.engine.add_sequence(bad)


def test_floats_that_crossed_the_wire_mean_the_same() -> None:
    sent = replace(NOISE, min_p=0.1, repetition_penalty=1.1, logit_bias=((3, 0.3),))
    wired = replace(
        sent,
        temperature=0.699999988079071,
        top_p=0.8999999761581421,
        min_p=0.10000000149011612,
        repetition_penalty=1.100000023841858,
        logit_bias=((3, 0.30000001192092896),),
    )
    assert expected_ids(SPEC, PROMPT, sampling=wired) == expected_ids(SPEC, PROMPT, sampling=sent)


def test_logprobs_come_where_they_are_asked_for(running: RunningEngine) -> None:
    asking = NewSequence("a", PROMPT, stopping=StoppingParams(max_tokens=6), logprobs=2, prompt_logprobs=1)
    # The same prompt, some of it cached by now, and some of its answer made elsewhere.
    whole = expected_ids(SPEC, PROMPT, stopping=asking.stopping)
    outputs: dict[str, list[Output]] = {}
    for sequence in (asking, replace(asking, sequence_id="b", emitted_ids=whole[:2]), NewSequence("c", PROMPT)):
        running.engine.add_sequence(sequence)
        while running.engine.has_work():
            for output in running.engine.step():
                outputs.setdefault(output.sequence_id, []).append(output)
    told = {name: [one for output in some for one in output.logprobs] for name, some in outputs.items()}
    assert [one.alternatives[0] for one in told["a"]] == [
        (token, one.logprob) for token, one in zip(whole, told["a"], strict=True)
    ]
    assert len({one.logprob for one in told["a"]}) > 1
    assert told["b"] == told["a"][2:]
    assert not told["c"]
    assert [len(outputs[name][0].prompt_logprobs) for name in "abc"] == [2, 2, 0]
    assert outputs["a"][0].prompt_logprobs == outputs["b"][0].prompt_logprobs


def test_log_probabilities_of_a_long_prompt_come_with_the_steps_that_compute_them(running: RunningEngine) -> None:
    # All at once they would be a step of their own, for which every other sequence waits.
    prompt, other = tuple(n % 250 for n in range(300)), StoppingParams(max_tokens=200, ignore_eos=True)
    running.engine.add_sequence(NewSequence("other", PROMPT, stopping=other))
    running.engine.add_sequence(NewSequence("long", prompt, stopping=StoppingParams(max_tokens=3), prompt_logprobs=1))
    told, others = list[TokenLogprobs](), list[int]()
    while len(told) < len(prompt) - 1:
        outputs = running.engine.step()
        parts = [output for output in outputs if output.sequence_id == "long"]
        told += (of_step := [one for output in parts for one in output.prompt_logprobs])
        assert len(of_step) <= 16, "a step's tokens"
        assert not any(output.token_ids for output in parts) or len(told) == len(prompt) - 1
        others.append(sum(len(output.token_ids) for output in outputs if output.sequence_id == "other"))
    assert [one.alternatives[0][0] for one in told] == list(prompt[1:])
    assert others == [1] * len(others)


def test_a_batch_gives_what_each_gives_alone(running: RunningEngine, adapters: list[AdapterSource]) -> None:
    sources = [None, *adapters]
    sequences = [
        NewSequence(
            f"s{number}",
            tuple(range(number + 1)),
            adapter=sources[number % 4],
            sampling=NOISE if number % 3 else SamplingParams(),
            stopping=StoppingParams(max_tokens=10 + number),
            choice=number % 2,
            tenant=f"t{number % 2}",
        )
        for number in range(16)
    ]
    answers = running.answers(*sequences)
    for sequence in sequences:
        ids, last = answers[sequence.sequence_id]
        digest = sequence.adapter.digest if sequence.adapter else ""
        assert last.finish is FinishReason.LENGTH
        assert ids == expected_ids(
            SPEC,
            sequence.prompt_ids,
            adapter_digest=digest,
            sampling=sequence.sampling,
            stopping=sequence.stopping,
            choice=sequence.choice,
        )
    stats = running.engine.stats()
    assert (stats.blocks_referenced, stats.slots_pinned, stats.slots_used) == (0, 0, 2)


@pytest.mark.parametrize("emitted", [1, 7, 19])
def test_a_continuation_goes_on_as_if_undisturbed(running: RunningEngine, emitted: int) -> None:
    stopping = StoppingParams(max_tokens=20)
    whole = expected_ids(SPEC, PROMPT, stopping=stopping)
    [(ids, _)] = running.answers(NewSequence("s", PROMPT, whole[:emitted], stopping=stopping)).values()
    assert ids == whole


def test_preemption_changes_no_token() -> None:
    running = RunningEngine(SPEC, blocks=12)
    try:
        sequences = [NewSequence(f"s{n}", (n, n), stopping=StoppingParams(max_tokens=40)) for n in range(6)]
        answers = running.answers(*sequences)
        for sequence in sequences:
            assert answers[sequence.sequence_id][0] == expected_ids(
                SPEC, sequence.prompt_ids, stopping=sequence.stopping
            )
    finally:
        running.engine.close()


STOP = expected_ids(SPEC, PROMPT)[5]


@pytest.mark.parametrize(
    ("spec", "stopping", "length", "finish"),
    [
        ("hash:?vocab=600&seed=3&end_after=9", StoppingParams(max_tokens=20), 9, FinishReason.END),
        ("hash:?vocab=600&seed=3&end_after=9", StoppingParams(max_tokens=8), 8, FinishReason.LENGTH),
        ("hash:?vocab=600&seed=3&end_after=9", StoppingParams(max_tokens=20, ignore_eos=True), 20, FinishReason.LENGTH),
        ("hash:?vocab=600&seed=3&end_after=9", StoppingParams(max_tokens=20, min_tokens=9), 20, FinishReason.LENGTH),
        (SPEC, StoppingParams(max_tokens=20, stop_token_ids=(STOP,)), 6, FinishReason.STOP),
        (SPEC, StoppingParams(max_tokens=20, min_tokens=10, stop_token_ids=(STOP,)), 20, FinishReason.LENGTH),
        # Of an adapter.
        (SPEC, StoppingParams(max_tokens=20, end_ids=(STOP,)), 6, FinishReason.END),
        (SPEC, StoppingParams(max_tokens=20, end_ids=(STOP,), ignore_eos=True), 20, FinishReason.LENGTH),
        (SPEC, StoppingParams(max_tokens=20, end_ids=(STOP,), min_tokens=10), 20, FinishReason.LENGTH),
    ],
)
def test_answers_end_where_they_should(spec: str, stopping: StoppingParams, length: int, finish: FinishReason) -> None:
    running = RunningEngine(spec)
    try:
        [(ids, last)] = running.answers(NewSequence("s", PROMPT, stopping=stopping)).values()
        assert (len(ids), last.finish) == (length, finish)
        assert ids == expected_ids(spec, PROMPT, stopping=stopping)
        if finish is FinishReason.END and not stopping.end_ids:
            assert ids.index(599) == length - 1
    finally:
        running.engine.close()


def test_an_adapter_whose_files_are_missing_fails_alone(running: RunningEngine, adapters: list[AdapterSource]) -> None:
    Path(adapters[0].directory, "adapter_model.safetensors").unlink()
    answers = running.answers(
        *(
            NewSequence(source.digest, PROMPT, adapter=source, stopping=StoppingParams(max_tokens=5))
            for source in adapters
        )
    )
    _, failed = answers["sha256:a"]
    assert failed.failure
    assert (failed.finish, failed.failure.reason) == (FinishReason.FAILED, "ADAPTER_UNLOADABLE")
    assert "adapter_model.safetensors" in failed.failure.message
    for digest in ("sha256:b", "sha256:c"):
        assert answers[digest][0] == expected_ids(
            SPEC, PROMPT, adapter_digest=digest, stopping=StoppingParams(max_tokens=5)
        )


def test_a_sequence_is_told_of_once_before_its_first_step() -> None:
    begun: list[str] = []
    engine = HashEngine(EngineConfig("hash:", rows=1, adapter_slots=1, step_tokens=16), on_begun=begun.append)
    for token, name in enumerate(("first", "second")):
        engine.add_sequence(NewSequence(name, (token,) * 40, stopping=StoppingParams(max_tokens=2)))
    assert (begun, engine.stats().sequences_taken) == ([], 2)
    told: list[tuple[list[str], list[str]]] = []
    while engine.has_work():
        outputs = [output.sequence_id for output in engine.step()]
        told.append((list(begun), outputs))
    engine.close()
    # The prompts are three chunks; the second sequence gets the row of the first.
    first, second = ["first"], ["first", "second"]
    assert told[:4] == [(first, []), (first, []), (first, ["first"]), (first, ["first"])]
    assert told[4:] == [(second, []), (second, []), (second, ["second"]), (second, ["second"])]


def test_no_sequence_is_larger_than_the_blocks() -> None:
    """A worker that claimed such a job would refuse it, although another worker could run it."""
    engine = RunningEngine("hash:?context=100", blocks=10).engine
    assert engine.limits.max_tokens == 40
    with pytest.raises(SequenceRefusedError):
        engine.add_sequence(NewSequence("s", (1,) * 30, stopping=StoppingParams(max_tokens=11)))


def test_only_allowed_ids_come_and_the_end_before_min_tokens_only_where_nothing_else_may(
    running: RunningEngine,
) -> None:
    def spec(name: str, allowed: tuple[int, ...], stopping: StoppingParams) -> NewSequence:
        return NewSequence(name, PROMPT, sampling=SamplingParams(allowed_token_ids=allowed), stopping=stopping)

    plain, late = StoppingParams(max_tokens=12), StoppingParams(max_tokens=12, min_tokens=4, stop_token_ids=(8,))
    answers = running.answers(spec("few", (5, 9, 300), plain), spec("one", (7,), plain), spec("stop", (8,), late))
    assert set(answers["few"][0]) == {5, 9, 300}
    assert answers["one"][0] == (7,) * 12
    assert len(answers["stop"][0]) == 5
