"""`python -m tests.trials.chaos --requests 10000 --kills 200 --seed 1 [--overlap] [--json FILE] [--history FILE]`.

Exit code 1 when a token was lost, repeated, out of order or of another adapter, when anything was left behind, when a
planned fault did not happen, and, with one fault at a time, when a silence was longer than it may be.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from pathlib import Path

import uvloop

from loraplex.runtime.rpc.children.process import LaunchError
from tests.trials.chaos.checker import check
from tests.trials.chaos.history import read_history
from tests.trials.chaos.plan import LEDGER_KINDS, Kind, make_plan
from tests.trials.chaos.report import as_json, as_lines, missed_aims
from tests.trials.chaos.run import run


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.trials.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=200, help="faults of all kinds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--overlap", action="store_true", help="several faults at once")
    parser.add_argument(
        "--ledger", action="store_true", help="tenants have plans; compare clients, events, accounts; its own kinds"
    )
    parser.add_argument("--kinds", default="", help=f"only these, commas between: {', '.join(Kind)}")
    parser.add_argument("--json", type=Path, help="where the counts go")
    parser.add_argument("--history", type=Path, help="keep the history here; without, it is kept when the run fails")
    parser.add_argument("--check", type=Path, help="only check this history")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8d %(message)s")
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    history: Path | None = arguments.check
    if history is None:
        history = _run(arguments)
        if history is None:
            return 1
    verdict = check(read_history(history))
    print("\n".join(as_lines(verdict)))
    missed = [] if arguments.overlap else missed_aims(verdict)
    print("\n".join(f"MISSED: {aim}" for aim in missed), end="\n" if missed else "")
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(verdict), indent=2) + "\n")
    failed = not verdict.holds or bool(missed)
    if failed:
        print(f"history: {history}; logs, of a run made just now: {_logs_of(history)}")
    elif not arguments.check:
        shutil.rmtree(_logs_of(history))
        if not arguments.history:
            shutil.rmtree(history.parent)
    return int(failed)


def _logs_of(history: Path) -> Path:
    return history.with_suffix(".logs")


def _run(arguments: argparse.Namespace) -> Path | None:
    """The history of a new run; None when the cluster could not be kept."""
    kinds = [Kind(name) for name in arguments.kinds.split(",") if name]
    if arguments.ledger and (others := set(kinds) - set(LEDGER_KINDS)):
        print(f"error: --kinds: --ledger has {', '.join(LEDGER_KINDS)}, not {', '.join(others)}", file=sys.stderr)
        return None
    plan = make_plan(
        arguments.requests,
        arguments.kills,
        arguments.seed,
        overlap=arguments.overlap,
        kinds=kinds,
        ledger=arguments.ledger,
    )
    history: Path = arguments.history or Path(tempfile.mkdtemp(prefix="chaos-")) / "history.jsonl"
    history.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        directory = Path(name)
        try:
            uvloop.run(run(plan, directory, history))
        except LaunchError as error:
            print(f"error: {error}", file=sys.stderr)
            return None
        finally:
            shutil.rmtree(_logs_of(history), ignore_errors=True)
            shutil.copytree(directory / "logs", _logs_of(history))
    return history
