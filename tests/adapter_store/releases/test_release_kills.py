"""A store that is killed in the middle of a promotion: when it is back, all of the promotion is there or nothing.

RELEASE_KILLS moments, spread evenly over the instructions that SQLite runs for it, and as many over the bytes that its
commit writes into the journal; `make releases` takes 50.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.adapter_store.database import Database
from loraplex.adapter_store.embedded import EmbeddedDatabase
from loraplex.contracts.artifacts.names import AdapterName, RevisionName
from loraplex.contracts.artifacts.outcomes import Outcomes, StepOutcomes
from loraplex.releases.releases import Releases
from loraplex.releases.rollouts import GateResult, Origin, ReleaseName, RolloutPlan, RolloutStep

MOMENTS = int(os.environ.get("RELEASE_KILLS", "10"))
SUPPORT = AdapterName("acme", "support")
DIGESTS = [f"sha256:{number:064x}" for number in (1, 2)]


def make_catalog(path: Path) -> None:
    """Write a catalog in which release 1 is live, and release 2 a canary that one report makes live."""
    database = EmbeddedDatabase(path)
    with database.transaction() as rows:
        rows.execute("INSERT INTO adapters VALUES (1, 'acme', 'support', 'tiny', 1, 1, 1)")
        for number, digest in enumerate(DIGESTS, start=1):
            rows.execute(
                "INSERT INTO revisions VALUES (?, 1, ?, 'sha256:base', 8, ?, 1, ?, 1, 1, NULL)",
                (number, digest, f"c{number}", f"w{number}"),
            )
        rows.execute("INSERT INTO aliases VALUES (1, 'live', ?)", (DIGESTS[0],))
    releases = Releases(database)
    for number, digest in enumerate(DIGESTS, start=1):
        name = ReleaseName(SUPPORT, number)
        releases.create(RevisionName("acme", "support", digest), Origin(), "test")
        releases.qualify(name, "", [GateResult("golden", True)], "test")
        releases.promote(name, "", RolloutPlan((RolloutStep(50, requests=5),)) if number == 2 else None, "test")
    database.close()


def report(database: Database) -> None:
    """Report what makes the canary live: its sums, both releases, their histories and the alias change."""
    sums = StepOutcomes(candidate=Outcomes(requests=5))
    changed = Releases(database).take_outcomes("router", {(ReleaseName(SUPPORT, 2), 0): sums})
    assert [release.state.value for release in changed] == ["live"]


def seen(path: Path) -> str:
    """Return all that a promotion changes, after the catalog was opened again."""
    database = EmbeddedDatabase(path)
    with database.reading() as rows:
        state = [
            [tuple(row) for row in rows.execute(query)]
            for query in (
                "SELECT number, state, baseline, step FROM releases ORDER BY number",
                "SELECT alias, digest FROM aliases",
                "SELECT number, count(*) FROM release_events GROUP BY number",
                "SELECT count(*) FROM release_outcomes",
                "SELECT changes FROM adapters",
            )
        ]
    database.close()
    return json.dumps(state)


def in_child(path: Path, work: Callable[[Database], None], kill_at: int | None = None) -> int:
    """Work on a catalog in a child that kills itself at an instruction of SQLite, or at the end; returns its status."""
    if (child := os.fork()) == 0:
        database, count = EmbeddedDatabase(path), 0

        def step() -> int:
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return 0

        database._connection.set_progress_handler(step, 1)
        work(database)
        path.with_suffix(".count").write_text(str(count))
        os.kill(os.getpid(), signal.SIGKILL)  # with the commit in the journal
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(directory: Path) -> None:
    """Kill a promotion at every moment; prints what was seen before, after, and after each kill, as JSON."""
    template = directory / "template"
    make_catalog(template)

    def copy(name: str) -> Path:
        return Path(shutil.copy(template, directory / name))

    whole = copy("whole")
    before = seen(copy("before"))
    kills = [in_child(whole, report)]
    instructions, states = int(whole.with_suffix(".count").read_text()), []
    journal = whole.with_name("whole-wal").read_bytes()
    for moment in range(MOMENTS + 1):
        path = copy(f"torn {moment}")
        path.with_name(f"{path.name}-wal").write_bytes(journal[: len(journal) * moment // MOMENTS])
        states.append(seen(path))
    after = seen(whole)
    for moment in range(MOMENTS):
        path = copy(str(moment))
        kills.append(in_child(path, report, kill_at=1 + instructions * moment // MOMENTS))
        states.append(seen(path))
    print(json.dumps({"before": before, "after": after, "kills": kills, "states": states}))


def test_a_promotion_is_whole_or_invisible_whenever_the_store_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.adapter_store.releases.test_release_kills", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    before, after = result["before"], result["after"]
    assert '"canary"' in before
    assert '"canary"' not in after
    states = result["states"]
    print(f"{len(states)} moments: {states.count(before)} before, {states.count(after)} after the promotion")
    assert set(result["kills"]) == {-signal.SIGKILL}
    assert set(states) == {before, after}


@pytest.mark.parametrize("table", ["releases", "release_events", "release_outcomes"])
def test_releases_go_with_their_adapter(tmp_path: Path, table: str) -> None:
    make_catalog(tmp_path / "catalog")
    with sqlite3.connect(tmp_path / "catalog") as rows:
        rows.execute("PRAGMA foreign_keys = ON")
        rows.execute("DELETE FROM adapters")
        assert rows.execute(f"SELECT count(*) FROM {table}").fetchone()[0] == 0
    rows.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
