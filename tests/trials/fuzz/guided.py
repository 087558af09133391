"""Fuzz a target guided by coverage: `python -m tests.trials.fuzz.guided TARGET FOLDER -max_total_time=60 ...`.

FOLDER keeps the texts that reach new code; all further arguments are libFuzzer's. Needs atheris.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import atheris

ROOMS = [
    "jinja2",
    "loraplex.contracts",
    "loraplex.router",
    "loraplex.runtime",
    "loraplex.worker.io",
    "loraplex.worker.engine.scheduling",
]


def main() -> None:
    """Write the target's seeds and words into the folder, and fuzz until libFuzzer ends the process."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    with atheris.instrument_imports(include=ROOMS, enable_loader_override=False):
        from tests.trials.fuzz.targets import TARGETS
    target, corpus = TARGETS[name], folder / name
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(target.seeds):
        (corpus / f"seed-{index}").write_bytes(seed)
    arguments = [sys.argv[0], str(corpus), *sys.argv[3:]]
    if target.words:
        words = folder / f"{name}.dict"
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
        arguments.append(f"-dict={words}")
    if target.change is None:
        atheris.Setup(arguments, target.try_out)
    else:
        atheris.Setup(arguments, target.try_out, custom_mutator=partial(_mutated, target.change))
    atheris.Fuzz()


def _mutated(change: Callable[[bytes, random.Random], bytes], data: bytes, max_size: int, seed: int) -> bytes:
    """Change fields mostly, and bytes as libFuzzer does otherwise."""
    draw = random.Random(seed)
    if draw.random() < 0.2:
        made: bytes = atheris.Mutate(data, len(data) + 64)
    else:
        made = change(data, draw)
    return made if len(made) <= max_size else data


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    main()
