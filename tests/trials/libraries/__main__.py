"""`make clients`: installs client libraries, each in an environment of its own, and tries them with a real cluster."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from examples.real import Unavailable, real_model
from tests.trials.libraries.environments import InstallError, install, running_cluster
from tests.trials.libraries.library import LIBRARIES, ROOT

ENVIRONMENTS = ROOT / ".cache/clients"
# The adapter that answers gets a chat template that renders tools, as the models' own do not.
TEMPLATE = ROOT / "tests/router/text/families/hermes.jinja"


@asynccontextmanager
async def gateway() -> AsyncIterator[tuple[str, str]]:
    """Run a cluster as a user does, with the real model where it can be had; yields its gateway and an adapter."""
    try:
        model, source = await asyncio.to_thread(real_model), ROOT / "examples/real_adapters/globex/triage"
    except Unavailable as error:
        print(f"The shipped model answers: {error}", file=sys.stderr, flush=True)
        model, source = ROOT / "examples/model", ROOT / "examples/adapters/acme/shout"
    with tempfile.TemporaryDirectory(prefix="loraplex-clients-") as directory:
        adapter = shutil.copytree(source, Path(directory) / "adapters" / source.name)
        shutil.copy(TEMPLATE, adapter / "chat_template.jinja")
        # In float32 greedy answers do not depend on what a prefix cache has.
        flags = ("--model", str(model), "--dtype", "float32", "--adapters", str(adapter.parent))
        async with running_cluster(*flags) as addresses:
            yield f"http://{addresses['http']}", adapter.name


async def main(names: Sequence[str]) -> int:
    """Try the libraries of these names, or all; print a table, and return 1 if a scenario failed."""
    failed, chosen = False, [library for library in LIBRARIES if not names or library.name in names]
    row = f"{{:{max(len(library.name) for library in chosen)}}}  {{:8}}  {{:17}}  {{}}"
    print(row.format("library", "version", "scenario", "result"), flush=True)
    async with gateway() as (url, model):
        for library in chosen:
            try:
                directory = ENVIRONMENTS / library.name
                interpreter = await asyncio.to_thread(install, directory, library.packages, library.program)
            except InstallError as error:
                failed = failed or not error.unreachable
                print(row.format(library.name, library.version, "-", error), flush=True)
                continue
            outcomes = await library.outcomes(interpreter, directory, url, model)
            for scenario, why in outcomes.items():
                first = " ".join(why.split())[:300]
                print(row.format(library.name, library.version, scenario, first or "ok"), flush=True)
            if any(outcomes.values()):
                failed = True
                print(f"see {(directory / 'script.log').relative_to(ROOT)}")
    return int(failed)


def _names(text: str) -> list[str]:
    """Return the names of libraries, which commas separate."""
    names = [name for name in text.split(",") if name]
    known = [library.name for library in LIBRARIES]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(known)}")
    return names


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.trials.libraries", description=__doc__)
    parser.add_argument("--only", type=_names, default=[], metavar="NAME,NAME", help="these libraries alone")
    sys.exit(asyncio.run(main(parser.parse_args().only)))
