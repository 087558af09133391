"""Questions over one input: `python -m bench.decisions [--quick] [--json FILE] [--model DIR]`.

The time of a call of `Decide` that asks 1, 8 or 400 questions about a text of 1,000 tokens, or of what the model's
context leaves room for. Each text is new, so that nothing of it is in the prefix cache; 1 and 8 take turns. The ratios
are of the shortest calls: on a machine that does something else, too, a mean says more of that. The processor time is
that of all processes of the cluster, and of this client.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from bench.command import command_parser, run_parsed
from bench.local_cluster import process_ids, serving_cluster
from bench.processor_time import processor_s
from bench.report import Aim, Report, progress
from loraplex.cli.local import ClusterSettings
from loraplex_client import AsyncClient, Question

ROOT = Path(__file__).parents[1]
AIMS = {
    "8_over_1": Aim(at_most=1.5),
    "8_over_1_processor": Aim(at_most=1.5),
    "400_over_1": Aim(),
    "question_of_400_over_1": Aim(),
}
# Tokens of the text, and those that the model's context must have left for a question.
_TOKENS, _LEFT = 1000, 72
# Labels of one token, as most classifiers' are.
_QUESTIONS = tuple(Question(f"Which letter fits part {number}?", choices=["A", "B", "C"]) for number in range(400))
# Processes of the cluster whose processor time is measured, beside this client.
_ROOMS = ("router", "worker", "valkey")
_WORDS = ("order", "late", "money", "parcel", "again", "the", "and", "twice", "please", "answer", "is", "nobody")


def main() -> None:
    """Run the benchmark with the command line's arguments."""
    parser = command_parser("decisions", __doc__ or "")
    parser.add_argument("--model", metavar="DIR", default=str(ROOT / "examples/model"), help="a transformers directory")
    run_parsed(parser, measure)


def measure(arguments: argparse.Namespace) -> Report:
    """Measure a cluster of one worker."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(arguments.model, arguments.quick))


async def _measure(model: str, quick: bool) -> Report:
    counts, rounds = ((1, 8), 3) if quick else ((1, 8, 400), 9)
    calls: dict[int, list[_Took]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory(prefix="lp-") as directory:
        settings = ClusterSettings(model, port=0, store_port=0, data_dir=Path(directory), worker_flags=("--rows", "32"))
        async with serving_cluster(settings) as cluster, AsyncClient(cluster.router) as client:
            texts = _Texts(client)
            tokens = await texts.find_length()
            pids = process_ids(cluster, _ROOMS)
            await _ask(client, texts.draw(), _QUESTIONS[:8], pids)  # kernels compile
            for number in range(rounds):
                progress(f"round {number + 1} of {rounds}")
                for count in counts[: 2 if number else None]:
                    calls[count].append(await _ask(client, texts.draw(), _QUESTIONS[:count], pids))
    shortest = {count: min(took.wall_s for took in of) for count, of in calls.items()}
    used = {count: median(took.processor_s for took in of) for count, of in calls.items()}
    ratios = {f"{count}_over_1": shortest[count] / shortest[1] for count in counts[1:]}
    ratios["8_over_1_processor"] = used[8] / used[1]
    if 400 in shortest:
        ratios["question_of_400_over_1"] = shortest[400] / 400 / shortest[1]
    return Report(
        name="decisions",
        command="python -m bench.decisions" + (" --quick" if quick else ""),
        quick=quick,
        setup={"model": Path(model).name, "tokens": tokens, "rounds": rounds},
        rows=[
            {
                "questions": count,
                "shortest call ms": shortest[count] * 1e3,
                "median ms": median(took.wall_s for took in of) * 1e3,
                "processor ms": used[count] * 1e3,
                "calls": len(of),
            }
            for count, of in calls.items()
        ],
        ratios=ratios,
        aims=AIMS,
    )


@dataclass(frozen=True)
class _Took:
    """The time of a call, and the processor time of all processes meanwhile."""

    wall_s: float
    processor_s: float


async def _ask(client: AsyncClient, text: str, questions: Sequence[Question], pids: Mapping[str, int]) -> _Took:
    used, start = sum(processor_s(pids).values()), time.perf_counter()
    await client.decide(None, questions, messages=[{"role": "user", "content": text}], timeout_s=600)
    wall_s = time.perf_counter() - start
    return _Took(wall_s, sum(processor_s(pids).values()) - used)


class _Texts:
    """Draws texts of about the same number of tokens, each another one."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._random = random.Random(0)
        self._words = 100

    async def find_length(self) -> int:
        """Choose the number of words; return that of a text's tokens."""
        (model,) = await self._client.models()
        most = min(_TOKENS, model.context_length - _LEFT)
        sample = await self._client.count_tokens(self.draw())
        self._words = int(self._words * most / sample * 0.98)  # the texts differ by some tokens
        return await self._client.count_tokens(self.draw())

    def draw(self) -> str:
        """Return the next text."""
        return " ".join(self._random.choice(_WORDS) for _ in range(self._words))


if __name__ == "__main__":
    main()
