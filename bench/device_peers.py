"""Our engine on a device, in turn with two peers: transformers' continuous batching and peft's mixed batches."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from bench.bare_engine import BareEngine
from bench.peers import ContinuousBatches, StaticBatches
from bench.report import Figures
from bench.rounds import Case, Rounds, Timed
from bench.workload import Request, Workload

# Maximum tokens of a step, and tokens of a page, of transformers' continuous batching.
_STEP_TOKENS, _PAGE = 4096, 256
# Seeds that no other measurement uses, so that no prompt is in the prefix cache.
_BASE_SEED, _MIXED_SEED = 1_000_000, 2_000_000
_BASE, _CONTINUOUS = "engine, no adapters", "transformers, continuous"


@dataclass(frozen=True)
class PeerSetup:
    """The requests: all of them without adapters; the first `static_requests` with an adapter each, also for peft."""

    workload: Workload
    static_requests: int
    rounds: int


class _Answers(Protocol):
    def run(self, requests: Sequence[Request]) -> Timed: ...


def against_peers(
    setup: PeerSetup, engine: BareEngine, model: Path, adapters: Sequence[Path], vocabulary: int, device: str
) -> Figures:
    """Run our engine in turn with each peer, one peer after the other: a device need not hold all three models."""
    base = _against_continuous(setup, engine, model, vocabulary, device)
    _free(device)
    mixed = _against_peft(setup, engine, model, adapters[: setup.static_requests], vocabulary, device)
    _free(device)
    ours, peft = mixed.runs
    return Figures(
        [*base.rows(), *mixed.rows()],
        {"base_vs_hf_continuous": base.ratio(_BASE, _CONTINUOUS), "mixed_vs_peft_static": mixed.ratio(ours, peft)},
    )


def _against_continuous(setup: PeerSetup, engine: BareEngine, model: Path, vocabulary: int, device: str) -> Rounds:
    work, rounds = setup.workload, Rounds()
    # The blocks of all requests, with a spare page for each request and the pages of a spare request, because the peer
    # shares pages out unevenly.
    blocks = (work.requests + 1) * (-(-(work.prompt + work.long) // _PAGE) + 1)
    with ContinuousBatches(model, device, _STEP_TOKENS, blocks) as continuous:

        def case(name: str, answers: _Answers) -> Case:
            return Case(name, lambda number: answers.run(work.draw(_BASE_SEED + number, vocabulary)))

        rounds.run([case(_BASE, engine), case(_CONTINUOUS, continuous)], setup.rounds)
    return rounds


def _against_peft(
    setup: PeerSetup, engine: BareEngine, model: Path, adapters: Sequence[Path], vocabulary: int, device: str
) -> Rounds:
    rounds, count = Rounds(), len(adapters)
    static = StaticBatches(model, adapters, device, count)

    def case(name: str, answers: _Answers) -> Case:
        def run(number: int) -> Timed:
            return answers.run(setup.workload.draw(_MIXED_SEED + number, vocabulary, count)[:count])

        return Case(name, run)

    rounds.run(
        [case(f"engine, {count} adapters", engine), case(f"peft, {count} adapters, static", static)], setup.rounds
    )
    return rounds


def _free(device: str) -> None:
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
