"""Grammars are compiled beside the steps: nobody waits for another's, and a bad one fails its own sequences."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from loraplex.contracts.artifacts.hash_model import parse_hash_model
from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.build import grammar_digest, regex_grammar
from loraplex.contracts.grammars.matching import Vocabulary, compile_grammar, hash_vocabulary
from loraplex.contracts.grammars.prover import Prover, ProverBusyError
from loraplex.contracts.options import FinishReason, StoppingParams
from loraplex.hash_engine import HashEngine
from loraplex.worker.engine.scheduling.grammars import CompiledGrammars, GrammarThread
from loraplex.worker.engine.scheduling.loader_threads import LoaderThreads
from loraplex.worker.engine_api import EngineConfig, NewSequence, Output
from tests.hash_oracle import expected_ids

SPEC = "hash:?vocab=600&seed=3"
VOCABULARY = hash_vocabulary(parse_hash_model(SPEC))
TWO, THREE = regex_grammar("[a-z]{2}"), regex_grammar("[a-z]{3}")


class GatedProver(Prover):
    """A prover that waits for the test; it finds the grammars in `bad` bad, and is too busy for those in `busy`."""

    def __init__(self) -> None:
        super().__init__(600, {})
        self.gate = threading.Event()
        self.bad: set[str] = set()
        self.busy: set[str] = set()
        self.proven: list[str] = []

    def prove(self, grammar: str, path: str = "format", tenant: str = "") -> None:
        """See Prover."""
        assert self.gate.wait(60)
        self.proven.append(grammar)
        if grammar in self.bad:
            raise GrammarError(path, "is bad")
        if grammar in self.busy:
            raise ProverBusyError


@pytest.fixture
def prover() -> GatedProver:
    return GatedProver()


@pytest.fixture
def woken() -> threading.Event:
    return threading.Event()


@pytest.fixture
def engine(prover: GatedProver, woken: threading.Event) -> Iterator[HashEngine]:
    engine = HashEngine(EngineConfig(SPEC, rows=2, kv_blocks=40, block_size=4), woken.set)
    grammars = GrammarThread(lambda: VOCABULARY, lambda: prover, LoaderThreads(woken.set, threads=1))
    assert engine._grammars is not None
    engine._grammars.close()
    engine._grammars = engine._scheduler._grammars = grammars
    yield engine
    prover.gate.set()
    engine.close()


def finish(engine: HashEngine, woken: threading.Event, *names: str) -> dict[str, tuple[tuple[int, ...], Output]]:
    """Step until these have ended."""
    ids: dict[str, tuple[int, ...]] = {}
    ended: dict[str, tuple[tuple[int, ...], Output]] = {}
    while not set(names) <= set(ended):
        woken.clear()
        if not engine.has_work():
            assert woken.wait(60)
        for output in engine.step():
            ids[output.sequence_id] = ids.get(output.sequence_id, ()) + output.token_ids
            if output.finish:
                ended[output.sequence_id] = ids[output.sequence_id], output
    return ended


def sequence(name: str, grammar: str = "", emitted: tuple[int, ...] = ()) -> NewSequence:
    return NewSequence(name, (1, 2, 3), emitted, stopping=StoppingParams(5), grammar=grammar)


def test_others_pass_a_sequence_whose_grammar_is_not_ready(
    engine: HashEngine, prover: GatedProver, woken: threading.Event
) -> None:
    for one in (sequence("two", TWO), sequence("plain"), sequence("gone", THREE)):
        engine.add_sequence(one)
    ended = finish(engine, woken, "plain")
    assert ended["plain"][0] == expected_ids(SPEC, (1, 2, 3), stopping=StoppingParams(5))
    assert not engine.has_work(), "a sequence that waits for its grammar is no work"
    assert engine.stats().sequences_taken == 3
    engine.abort("gone")
    prover.gate.set()
    ended = finish(engine, woken, "two")
    assert ended["two"][0] == expected_ids(SPEC, (1, 2, 3), stopping=StoppingParams(5), grammar=TWO)
    assert ended["two"][1].finish is FinishReason.COMPLETE
    engine.add_sequence(sequence("again", TWO))
    assert set(finish(engine, woken, "again")) == {"again"}
    assert prover.proven.count(TWO) == 1
    assert THREE not in prover.proven, "nobody waits for it any more"
    engine.check()


def test_many_grammars_of_one_tenant_delay_another_by_one(
    engine: HashEngine, prover: GatedProver, woken: threading.Event
) -> None:
    many = [regex_grammar(f"[a-z]{{{number}}}") for number in range(4, 9)]
    for number, grammar in enumerate(many):
        engine.add_sequence(replace(sequence(f"many {number}", grammar), tenant="acme"))
    engine.add_sequence(replace(sequence("one", TWO), tenant="globex"))
    prover.gate.set()
    finish(engine, woken, "one", *(f"many {number}" for number in range(5)))
    assert prover.proven.index(TWO) <= 2


def test_a_grammar_that_one_tenant_has_used_takes_another_as_long_as_a_new_one(
    engine: HashEngine, prover: GatedProver, woken: threading.Event
) -> None:
    prover.gate.set()
    for tenant in ("acme", "globex", "acme"):
        engine.add_sequence(replace(sequence(tenant, TWO), tenant=tenant))
        finish(engine, woken, tenant)
    assert prover.proven == [TWO, TWO]


def test_the_first_grammar_of_a_warm_engine_waits_for_its_own_proof_alone(
    prover: GatedProver, woken: threading.Event
) -> None:
    made: list[str] = []

    def vocabulary() -> Vocabulary:
        made.append("vocabulary")
        return VOCABULARY

    def make_prover() -> GatedProver:
        made.append("prover")
        return prover

    grammars = GrammarThread(vocabulary, make_prover, LoaderThreads(woken.set, threads=1))
    prover.gate.set()
    grammars.warm()
    assert woken.wait(30)
    assert made == ["vocabulary", "prover"]
    assert not grammars.poll()
    grammars.close()


def test_a_bad_grammar_fails_its_own_sequences(engine: HashEngine, prover: GatedProver, woken: threading.Event) -> None:
    prover.gate.set()
    prover.bad, prover.busy = {TWO}, {THREE}
    for one in (sequence("bad", TWO), sequence("busy", THREE), sequence("plain")):
        engine.add_sequence(one)
    ended = finish(engine, woken, "bad", "busy", "plain")
    failures = {name: output.failure for name, (_, output) in ended.items()}
    assert failures["plain"] is None
    assert failures["bad"] is not None
    assert (failures["bad"].code, failures["bad"].reason) == ("INVALID_ARGUMENT", "GRAMMAR_FAILED")
    assert failures["busy"] is not None
    assert (failures["busy"].code, failures["busy"].reason) == ("UNAVAILABLE", "GRAMMAR_NOT_READY")


def test_an_answer_that_was_complete_before_a_crash_ends_without_a_step(
    engine: HashEngine, prover: GatedProver, woken: threading.Event
) -> None:
    prover.gate.set()
    whole = expected_ids(SPEC, (1, 2, 3), stopping=StoppingParams(5), grammar=TWO)
    engine.add_sequence(sequence("whole", TWO, whole))
    # The last token that it may have completes it, and the reason is the one that an undisturbed engine gives.
    engine.add_sequence(replace(sequence("last", TWO, whole), stopping=StoppingParams(len(whole))))
    engine.add_sequence(replace(sequence("long", TWO, whole[:1]), stopping=StoppingParams(1)))
    engine.add_sequence(sequence("wrong", TWO, (ord("1"),)))
    ended = finish(engine, woken, "whole", "wrong", "last", "long")
    assert ended["whole"][0] == ()
    assert ended["whole"][1].finish is FinishReason.COMPLETE
    assert ended["last"][1].finish is FinishReason.COMPLETE
    assert ended["long"][1].finish is FinishReason.LENGTH
    assert ended["wrong"][1].failure is not None
    assert engine.stats().steps == 0


def test_a_purge_forgets_the_proofs_too(engine: HashEngine, prover: GatedProver, woken: threading.Event) -> None:
    prover.gate.set()
    engine.add_sequence(sequence("two", TWO))
    finish(engine, woken, "two")
    prover._results[grammar_digest(THREE)] = "", "an error that quotes a tenant's format"
    assert engine.forget_tenant("acme", ())["compiled formats"].removed == 1
    assert not prover.known(THREE)


def test_compiled_grammars_are_kept_within_their_bytes() -> None:
    grammars = CompiledGrammars(most_bytes=360_000)
    names = [regex_grammar(f"[a-z]{{{number}}}") for number in range(1, 5)]
    for number, grammar in enumerate(names):
        grammars.put(grammar_digest(grammar), compile_grammar(VOCABULARY.tokens, grammar), len(grammar))
        assert grammars.get(grammar_digest(names[0])) is not None, number
    assert [grammars.get(grammar_digest(grammar)) is not None for grammar in names] == [True, False, True, True]
