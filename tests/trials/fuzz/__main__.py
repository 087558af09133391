"""`make fuzz`: fuzzes readers of strangers' bytes, every method and HTTP body of a cluster, for some time each.

Readers are guided by coverage where atheris is installed, which `make fuzz` does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from tests.trials.fuzz.plain import fuzz
from tests.trials.fuzz.targets import TARGETS
from tests.trials.hostile.cases import Case

CALLS, BODIES = "calls", "bodies"
_ALL = (*TARGETS, CALLS, BODIES)
# Number of calls at once, and maximum time in seconds of one.
_AT_ONCE, _CALL_S = 4, 1.0
# libFuzzer's limits: seconds of a read that hangs, MiB of memory, bytes of a text.
_LIMITS = ("-timeout=20", "-rss_limit_mb=2048", "-max_len=8192", "-verbosity=0", "-print_final_stats=1")


def main() -> int:
    """Fuzz what the command line names; print a line for each and what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.trials.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(_ALL)}; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each target (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="number that the draws come from (default 1)")
    parser.add_argument("--corpus", type=Path, default=Path(".fuzz"), help="folder of the texts that reach new code")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(_ALL):
        parser.error(f"no target {min(unknown)}; there are {', '.join(_ALL)}")
    failed = 0
    for name in given.targets or _ALL:
        print(f"{name:16}", end="", flush=True)
        if name == CALLS:
            failed += asyncio.run(_calls(given.seconds, given.seed))
        elif name == BODIES:
            failed += asyncio.run(_bodies(given.seconds, given.seed))
        elif find_spec("atheris"):
            failed += _guided(name, given.seconds, given.seed, given.corpus)
        else:
            failed += _plain(name, given.seconds, given.seed)
    return 1 if failed else 0


def _plain(name: str, seconds: float, seed: int) -> bool:
    runs, findings = fuzz(TARGETS[name], random.Random(seed), seconds=seconds)
    print(f"{runs:>9} runs, {len(findings)} findings, without a guide")
    for finding in findings:
        print(f"  {finding}")
    return bool(findings)


def _guided(name: str, seconds: float, seed: int, corpus: Path) -> bool:
    corpus.mkdir(parents=True, exist_ok=True)
    flags = [*_LIMITS, f"-max_total_time={seconds:.0f}", f"-seed={seed}", f"-artifact_prefix={corpus}/{name}-found-"]
    command = [sys.executable, "-m", "tests.trials.fuzz.guided", name, str(corpus), *flags]
    ended = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    runs, added = (_stat(ended.stdout, name) for name in ("number_of_executed_units", "new_units_added"))
    print(f"{runs:>9} runs, {'a finding' if ended.returncode else '0 findings'}, {added} texts reach new code")
    if ended.returncode:
        print("\n".join(f"  {line}" for line in ended.stdout.splitlines()[-40:]))
    return ended.returncode != 0


def _stat(text: str, name: str) -> str:
    found = re.search(rf"stat::{name}: +(\d+)", text)
    return found[1] if found else "?"


async def _calls(seconds: float, seed: int) -> bool:
    from tests.trials.fuzz.calls import changed_calls
    from tests.trials.hostile.run import attack, running
    from tests.trials.hostile.table import all_cases

    ends_at, sent = time.monotonic() + seconds, dict[str, Case]()

    def calls_in_time() -> Iterator[Case]:
        for case in changed_calls(all_cases(), random.Random(seed)):
            if time.monotonic() > ends_at:
                return
            sent[case.name] = case
            yield case

    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        async with running(Path(directory)) as cluster:
            outcome = await attack(cluster, calls_in_time(), _AT_ONCE)
            late = {name for name, took in outcome.seconds.items() if took > _CALL_S}
            # A call that waited for others takes its own time alone.
            alone = await attack(cluster, [sent[name.partition(": ")[2]] for name in late], 1)
    slow = {name: took for name, took in alone.seconds.items() if took > _CALL_S}
    failures = outcome.failures + alone.failures
    statuses = "  ".join(f"{count} {status}" for status, count in sorted(outcome.statuses.items()))
    print(f"{len(outcome.seconds):>9} calls, {len(failures)} without a clean status, {len(slow)} slow: {statuses}")
    for line in [*failures[:20], *(f"{name}: {took:.2f} s" for name, took in list(slow.items())[:20])]:
        print(f"  {line}")
    return bool(failures or slow)


async def _bodies(seconds: float, seed: int) -> bool:
    from tests.trials.fuzz.bodies import MODEL, changed_requests, fuzz_bodies, running

    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        # Answers end soon, whatever number of tokens a changed body asks for.
        async with running(Path(directory), f"{MODEL}&end_after=64") as cluster:
            ends_at = time.monotonic() + seconds
            requests = takewhile(lambda _: time.monotonic() < ends_at, changed_requests(random.Random(seed)))
            answers = await fuzz_bodies(cluster, requests)
    statuses = "  ".join(f"{count} {status}" for status, count in sorted(answers.statuses.items()))
    print(f"{answers.statuses.total():>9} bodies, {len(answers.findings)} internal errors: {statuses}")
    for finding in answers.findings[:20]:
        print(f"  {finding}")
    return bool(answers.findings)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # refused calls are what it is about
    sys.exit(main())
