"""Asks 40 questions of each task that no adapter was trained on, of its adapter and of the base model alone.

    python -m examples.check                       starts a cluster with the real model
    python -m examples.check --quantize int8       the same with quantized weights
    python -m examples.check --router HOST:PORT    asks a cluster that runs

The exit code is 1 where an adapter answers less than 95% right.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.real import ADAPTERS, Unavailable, real_model
from examples.tasks import CHECK, TASKS, Question, Task
from loraplex_client import AsyncClient, LoraplexError

# Least share of right answers of an adapter.
TARGET = 0.95
# Maximum tokens of an answer: the longest right one has 36.
ANSWER_TOKENS = 48
# Number of requests at once: as many as a worker computes together.
AT_ONCE = 32


@dataclass(frozen=True)
class Score:
    """The shares of right answers of a task's adapter and of the base model."""

    task: str
    questions: int
    adapter: float
    base: float


@contextmanager
def running_cluster(model: Path, adapters: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """Start `loraplex up` on free ports and give the router's address. Raises SystemExit with its error."""
    command = [str(Path(sys.executable).parent / "loraplex"), "up", "--model", str(model), "--adapters", str(adapters)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--store-port", "0", *flags], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if line.startswith("ready ")), None)
        if ready is None:
            raise SystemExit(process.wait())
        yield ready.split("router=")[1].split()[0]
    finally:
        process.terminate()
        process.wait()


async def ask(router: str, task: Task, adapter: str | None, questions: Sequence[Question]) -> list[str]:
    """Return the greedy answers to the questions, in their order."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(question: Question) -> str:
        async with slots:
            messages = [{"role": "user", "content": question.text}]
            answer = await client.chat(messages, adapter_id=adapter, max_tokens=ANSWER_TOKENS, temperature=0.0)
            return answer.text

    async with AsyncClient(router, task.tenant) as client:
        return list(await asyncio.gather(*map(one, questions)))


async def score(router: str, task: Task, count: int, seed: int) -> Score:
    """Ask the check's questions of a task's adapter and of the base model."""
    questions = task.questions(count, seed, CHECK)
    shares = []
    for adapter in (task.adapter, None):
        answers = await ask(router, task, adapter, questions)
        right = [task.is_right(*pair) for pair in zip(questions, answers, strict=True)]
        shares.append(sum(right) / len(questions))
        for question, answer, good in zip(questions, answers, right, strict=True):
            if adapter and not good:
                print(f"wrong: {question.text!r} -> {answer!r}, not {question.answer!r}", file=sys.stderr)
    return Score(task.adapter, len(questions), *shares)


def check(router: str, count: int, seed: int) -> list[Score]:
    """Score every task, one after the other. Raises LoraplexError."""
    return [asyncio.run(score(router, task, count, seed)) for task in TASKS.values()]


def main() -> int:
    """Print the scores, and return 1 where one is below the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", metavar="HOST:PORT", help="router of a running cluster; default: starts one")
    parser.add_argument("--model", type=Path, help="transformers directory; default: the real model")
    parser.add_argument("--adapters", type=Path, default=ADAPTERS, help="directory of TENANT/NAME adapters")
    parser.add_argument("--quantize", default="", metavar="SCHEME", help="scheme of the weights, such as int8")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--questions", type=int, default=40, metavar="N", help="number of questions of each task")
    parser.add_argument("--seed", type=int, default=1, help="seed of the questions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores to FILE")
    arguments = parser.parse_args()
    try:
        if arguments.router:
            scores = check(arguments.router, arguments.questions, arguments.seed)
        else:
            flags = ["--dtype", arguments.dtype, *(["--quantize", arguments.quantize] if arguments.quantize else [])]
            with running_cluster(arguments.model or real_model(), arguments.adapters, flags) as router:
                scores = check(router, arguments.questions, arguments.seed)
    except (Unavailable, LoraplexError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'task':10} {'questions':>9} {'adapter':>8} {'base':>6}")
    for line in scores:
        print(f"{line.task:10} {line.questions:9} {line.adapter:8.3f} {line.base:6.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in scores], indent=2) + "\n")
    return int(any(line.adapter < TARGET for line in scores))


if __name__ == "__main__":
    sys.exit(main())
