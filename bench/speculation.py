"""Drafts of the next tokens on a CPU: `python -m bench.speculation [--quick] [--peer FOLDER] [--json FILE]`.

SmolLM2-135M-Instruct answers the requests of speculation_texts.py with drafts and without, in turn; the ids are the
same. With `--peer FOLDER` vLLM's CPU build, which is installed in that folder, answers those of one round too, with its
n-gram drafts and without. Then three adapters answer questions of their tasks, with a corpus of answers each, and
with one for all; and a tenant guesses by time whether another has asked a question.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from bench.command import command_parser, run_parsed
from bench.isolated import Isolated
from bench.report import Aim, Report, progress
from bench.rounds import Timed
from bench.speculation_engine import NO_DRAFTS, ONE_FOR_ALL, OWN, Answered, Asked, Drafts, speculating
from bench.speculation_texts import WORKLOADS, Conversation, conversations
from bench.vllm_peer import VllmPeer, add_peer_argument
from bench.workload import Request
from examples.real import ADAPTERS, Unavailable, real_model
from examples.tasks import CHECK, TASKS
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine_api import AdapterSource, NewSequence

AIMS = {
    "edit_1": Aim(at_least=1.8),
    "extract_1": Aim(at_least=1.8),
    "chat_1": Aim(at_least=1),
    "agent_1": Aim(),
    "edit_8": Aim(),
    "extract_8": Aim(),
    "chat_8": Aim(),
    "agent_8": Aim(),
    "full_32": Aim(at_least=0.98),
    "edit_1_over_ngram": Aim(at_least=1),
    "extract_1_over_ngram": Aim(at_least=1),
    "guess_from_chance": Aim(at_most=0.05),
}
ROWS = 32
_FULL = "full"
_WITHOUT, _WITH, _PEER, _NGRAM = "without", "with", "vLLM", "vLLM, n-gram"
_NGRAM_CONFIG = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
# Tokens of an answer whose time another tenant guesses by.
_GUESSED_TOKENS = 12
_THINGS = (
    "a harbour", "a violin", "the moon", "a garden", "a letter", "an old car", "the winter", "a teacher", "a river",
    "a baker", "the desert", "a castle", "a horse", "the rain", "a market", "a doctor", "a ship", "the night", "a dog",
    "a mirror", "a forest", "the sea", "a king", "a train", "a storm", "the sun", "a clock", "a painter", "a mountain",
    "an apple",
)  # fmt: skip

_ASKED = ("Write a sentence", "Tell me a short story", "Say what you know")


@dataclass(frozen=True)
class Setup:
    """The number of rounds, of requests one by one, of questions to each adapter, and of guesses with each corpus."""

    rounds: int = 3
    alone: int = 2
    questions: int = 32
    guesses: int = 400
    guesses_of_one: int = 60


FULL = Setup()
QUICK = Setup(rounds=1, alone=1, questions=4, guesses=8, guesses_of_one=8)


@dataclass(frozen=True)
class Case:
    """Requests of a workload, of which so many are answered at once."""

    workload: str
    at_once: int

    @property
    def name(self) -> str:
        """Return the name in rows."""
        return f"{self.workload}, {self.at_once} at once"

    def conversations(self, turn: int, alone: int) -> list[Conversation]:
        """Draw the chats of a round: other texts than in the round before, where they are answered one by one."""
        if self.workload == _FULL:
            each = ROWS // 4
            kinds = [workload for workload in WORKLOADS if workload != "agent"]
            return [chat for kind in kinds for chat in conversations(kind, 0, each)]
        count = alone if self.at_once == 1 else self.at_once
        return conversations(self.workload, turn * count, count)


CASES = [*(Case(workload, at_once) for at_once in (1, 8) for workload in WORKLOADS), Case(_FULL, ROWS)]
Engine = Isolated[Asked, Answered]


@dataclass
class Measured:
    """The timed rounds of a case by side, and its drafts."""

    rounds: dict[str, list[Timed]] = field(default_factory=dict)
    drafts: Drafts = field(default_factory=Drafts)

    def tokens_per_s(self, side: str) -> float:
        """Return the median throughput."""
        return median(run.tokens_per_s for run in self.rounds[side])

    def ratio(self, side: str, other: str) -> float:
        """Return the median of the ratios of the rounds that both have."""
        pairs = zip(self.rounds[side], self.rounds[other], strict=False)
        return median(one.tokens_per_s / two.tokens_per_s for one, two in pairs)


def main() -> None:
    """Run the benchmark with the command line's arguments, or say in a line why it cannot be run here."""
    parser = command_parser("speculation", __doc__ or "")
    add_peer_argument(parser)
    try:
        run_parsed(parser, lambda given: measure(QUICK if given.quick else FULL, given.quick, given.peer))
    except Unavailable as error:
        progress(f"bench.speculation is left out: {error}")


def measure(setup: Setup, quick: bool, peer: Path | None = None) -> Report:
    """Start the engines and the peer, and run everything. Raises Unavailable."""
    model = real_model()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with ExitStack() as stack:
        progress(f"loading {model.name} with drafts and without")
        engines: dict[str, Engine] = {
            side: stack.enter_context(Isolated(partial(speculating, model, ROWS, corpus)))
            for side, corpus in ((_WITHOUT, NO_DRAFTS), (_WITH, OWN))
        }
        peers = {} if peer is None else _start_peers(stack, peer, model)
        measured = run_cases(setup, engines, peers, tokenizer)
        with Isolated(partial(speculating, model, ROWS, ONE_FOR_ALL)) as of_all:
            corpora = {OWN: engines[_WITH], ONE_FOR_ALL: of_all}
            adapters = [_adapter_row(setup, tokenizer, corpus, corpora[corpus]) for corpus in corpora]
            areas = {
                OWN: guess(corpora[OWN], tokenizer, setup.guesses),
                ONE_FOR_ALL: guess(of_all, tokenizer, setup.guesses_of_one),
            }
    flags = (" --quick" if quick else "") + (" --peer FOLDER" if peers else "")
    return Report(
        name="speculation",
        command=f"python -m bench.speculation{flags}",
        quick=quick,
        setup=asdict(setup) | {"model": model.name, "rows": ROWS, "n-gram": _NGRAM_CONFIG},
        rows=[*rows_of(measured), *(row for rows in adapters for row in rows), *_guess_rows(setup, areas)],
        ratios=ratios_of(measured) | {"guess_from_chance": abs(areas[OWN] - 0.5)},
        aims=AIMS,
    )


def _start_peers(stack: ExitStack, folder: Path, model: Path) -> dict[str, VllmPeer]:
    """Start vLLM with its n-gram drafts and without; none where it cannot be had here."""
    peers: dict[str, VllmPeer] = {}
    try:
        for side, config in ((_PEER, None), (_NGRAM, _NGRAM_CONFIG)):
            peers[side] = stack.enter_context(VllmPeer(folder, model, ROWS, "bfloat16", speculative=config))
    except RuntimeError as error:
        progress(f"without the peer: {error}")
        return {}
    return peers


def run_cases(
    setup: Setup, engines: Mapping[str, Engine], peers: Mapping[str, VllmPeer], tokenizer: Tokenizer
) -> dict[Case, Measured]:
    """Run every case on one side after the other, round by round; round 0 is a warm-up."""
    # Grammars are compiled before.
    chats = conversations("extract", 0, 8)
    warm = Asked([_sequence(chat, chat.ask(tokenizer, 0), "warm", tokens=1) for chat in chats], 1)
    for engine in engines.values():
        engine.run(warm)
    measured = {case: Measured() for case in CASES}
    for turn in range(setup.rounds + 1):
        for case, of in measured.items():
            # A round of the peer takes minutes: its first step of each kind is warmed up, then every case is run once.
            runs = turn == 1 or (turn == 0 and (case.at_once == 1 or case.workload == "chat"))
            _run_round(setup, case, turn, of, engines, peers if runs and case.workload != _FULL else {}, tokenizer)
    return measured


def _run_round(
    setup: Setup,
    case: Case,
    turn: int,
    measured: Measured,
    engines: Mapping[str, Engine],
    peers: Mapping[str, VllmPeer],
    tokenizer: Tokenizer,
) -> None:
    chats = case.conversations(turn, setup.alone)
    timed: dict[str, Timed] = {}
    # A tenant of its own for each round: nothing of the others is in its caches.
    tenant = f"{case.name} {turn}"
    for number in range(len(chats[0].turns)):
        sequences = [_sequence(chat, chat.ask(tokenizer, number), tenant) for chat in chats]
        # In turn, and each first every other round: other work of the machine affects both alike.
        sides = [*engines][:: 1 if turn % 2 else -1]
        answered = {side: engines[side].run(Asked(sequences, case.at_once)) for side in sides}
        assert answered[_WITH].ids == answered[_WITHOUT].ids, f"{case.name}: drafts have changed an answer"
        for side, answer in answered.items():
            timed[side] = _sum(timed.get(side), Timed(answer.tokens, answer.seconds))
        for side, peer in peers.items():
            timed[side] = _sum(timed.get(side), _run_peer(peer, chats, sequences, case.at_once, tenant))
        for chat in chats:
            chat.answered(tokenizer, answered[_WITHOUT].ids[chat.name])
        if turn:
            measured.drafts = sum(answered[_WITH].drafts.values(), measured.drafts)
    speeds = ", ".join(f"{side} {run.tokens_per_s:.1f}" for side, run in timed.items())
    progress(f"round {turn} of {setup.rounds}: {case.name}: {speeds} tokens/s")
    if turn:
        for side, each in timed.items():
            measured.rounds.setdefault(side, []).append(each)


def _sum(before: Timed | None, run: Timed) -> Timed:
    return run if before is None else Timed(before.tokens + run.tokens, before.seconds + run.seconds)


def _sequence(chat: Conversation, prompt: tuple[int, ...], tenant: str, tokens: int | None = None) -> NewSequence:
    stopping = StoppingParams(tokens or chat.tokens)
    return NewSequence(chat.name, prompt, tenant=tenant, grammar=chat.grammar, stopping=stopping)


def _run_peer(
    peer: VllmPeer, chats: Sequence[Conversation], sequences: Sequence[NewSequence], at_once: int, salt: str
) -> Timed:
    requests = [
        Request(sequence.prompt_ids, chat.tokens, json_schema=chat.schema)
        for chat, sequence in zip(chats, sequences, strict=True)
    ]
    parts = [requests[first : first + at_once] for first in range(0, len(requests), at_once)]
    runs = [peer.run(part, salt, ends=True) for part in parts]
    return Timed(sum(run.tokens for run in runs), sum(run.seconds for run in runs))


def rows_of(measured: Mapping[Case, Measured]) -> list[Mapping[str, Any]]:
    """Return a row for each case."""
    return [
        {"case": case.name, "unit": "tokens/s"}
        | {side: of.tokens_per_s(side) for side in of.rounds}
        | {"drafted ids accepted": of.drafts.acceptance, "tokens of a step with a draft": of.drafts.mean_length}
        for case, of in measured.items()
    ]


def ratios_of(measured: Mapping[Case, Measured]) -> dict[str, float]:
    """Return the speed with drafts over that without, and over the peer's with its own where it was run."""
    ratios = {}
    for case, of in measured.items():
        key = f"{case.workload}_{case.at_once}"
        if key in AIMS:
            ratios[key] = of.ratio(_WITH, _WITHOUT)
        if f"{key}_over_ngram" in AIMS and _NGRAM in of.rounds:
            ratios[f"{key}_over_ngram"] = of.ratio(_WITH, _NGRAM)
    return ratios


def _adapter_row(setup: Setup, tokenizer: Tokenizer, corpus: str, engine: Engine) -> list[Mapping[str, Any]]:
    """Return a row for each adapter: what became of drafts while all answer questions of their tasks, in turn."""
    sequences: dict[str, list[NewSequence]] = {}
    for name, task in TASKS.items():
        adapter = AdapterSource(name, str(ADAPTERS / task.tenant / task.adapter))
        sequences[name] = []
        for number, question in enumerate(task.questions(setup.questions, 1, CHECK)):
            chat = Conversation(f"{name} {number}", [question.text], tokens=64)
            prompt, stopping = chat.ask(tokenizer, 0), StoppingParams(chat.tokens)
            sequences[name].append(
                NewSequence(chat.name, prompt, adapter=adapter, tenant=task.tenant, stopping=stopping)
            )
    mixed = [sequence for of_each in zip(*sequences.values(), strict=True) for sequence in of_each]
    run = engine.run(Asked(mixed, len(sequences)))
    rows: list[Mapping[str, Any]] = []
    for name, of in sequences.items():
        drafts = sum((run.drafts[one.sequence_id] for one in of), Drafts())
        tokens = sum(len(run.ids[one.sequence_id]) for one in of)
        rows.append(
            {
                "adapter": name,
                "corpus": corpus,
                "accepted": drafts.acceptance,
                "tokens of a step with a draft": drafts.mean_length,
                "accepted of all tokens": drafts.accepted / tokens,
            }
        )
    return rows


def guess(engine: Engine, tokenizer: Tokenizer, guesses: int) -> float:
    """Return the area under the curve (0.5: chance) of a tenant's guesses whether another has asked a question.

    The guess: it has, where the answer to the same question comes sooner.
    """
    chance = random.Random(1)
    pairs = [(one, two) for one in _THINGS for two in _THINGS if one != two]
    questions = [f"{asked} about {one} and {two}." for asked in _ASKED for one, two in pairs]
    chance.shuffle(questions)
    holds = [number % 2 == 0 for number in range(guesses)]
    chance.shuffle(holds)
    seconds: dict[bool, list[float]] = {True: [], False: []}

    def sequence(question: str, tenant: str) -> NewSequence:
        prompt = Conversation(question, [question], _GUESSED_TOKENS).ask(tokenizer, 0)
        stopping = StoppingParams(_GUESSED_TOKENS, ignore_eos=True)
        return NewSequence(f"{tenant}: {question}", prompt, tenant=tenant, stopping=stopping)

    for number, held in enumerate(holds):
        asked, other = questions[2 * number], questions[2 * number + 1]
        engine.run(Asked([sequence(asked if held else other, "victim")], 1))
        curious = sequence(asked, "curious")
        seconds[held].append(engine.run(Asked([curious], 1)).seconds_of[curious.sequence_id])
    return area(seconds[True], seconds[False])


def area(lower: Sequence[float], higher: Sequence[float]) -> float:
    """Return the share of pairs in which the first is lower; ties count half."""
    pairs = [(one < other) + (one == other) / 2 for one in lower for other in higher]
    return sum(pairs) / len(pairs)


def _guess_rows(setup: Setup, areas: Mapping[str, float]) -> list[Mapping[str, Any]]:
    return [
        {"guess of another tenant's question, by": corpus, "guesses": guesses, "area under the curve": areas[corpus]}
        for corpus, guesses in ((OWN, setup.guesses), (ONE_FOR_ALL, setup.guesses_of_one))
    ]


if __name__ == "__main__":
    main()
