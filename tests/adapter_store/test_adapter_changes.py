"""Routers are told what changes the meaning of an adapter's name, once they can see it, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from loraplex.adapter_store.adapter_changes import AdapterChanges
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.embedded import EmbeddedDatabase
from loraplex.adapter_store.grants import Grants
from loraplex.contracts.artifacts.names import AdapterName

MADE = (
    "INSERT INTO adapters VALUES (1, 'acme', 'a', 'tiny', 0, 0, 0), (2, 'globex', 'b', 'tiny', 0, 0, 0)",
    "INSERT INTO revisions (adapter_id, digest, base_digest, rank, config_digest, config_bytes, weights_digest, "
    "weights_bytes, create_ns) VALUES (1, 'sha256:1', 'base', 1, '', 0, '', 0, 0)",
)


class News:
    """A reader of the changes."""

    def __init__(self, changes: AdapterChanges) -> None:
        self._changes, self._seen = changes, ("", 0)
        self.look()

    def look(self) -> list[str] | None:
        """Return the names that have changed since the last look; None: all may have."""
        epoch, latest, names = self._changes.since(*self._seen)
        is_same, self._seen = epoch == self._seen[0], (epoch, latest)
        return names if is_same else None


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = EmbeddedDatabase(tmp_path / "catalog.db")
    write(database, *MADE)
    yield database
    database.close()


def write(database: Database, *statements: str) -> None:
    with database.transaction() as rows:
        for statement in statements:
            rows.execute(statement)


def test_changes_of_each_kind_are_told_once_they_are_committed(database: Database) -> None:
    news = News(database.adapter_changes)
    for statement in (
        "UPDATE adapters SET changes = 1 WHERE id = 1",
        "INSERT INTO aliases VALUES (1, 'live', 'sha256:1')",
        "UPDATE aliases SET digest = digest",
        "UPDATE revisions SET base_digest = 'other' WHERE adapter_id = 1",
        "INSERT INTO certificates (adapter_id, digest, base_digest, quantization, prompts, drawn, tokens, agreement, "
        "mean_kl, max_kl, create_ns) VALUES (1, 'sha256:1', 'base', 'fp8', 1, 0, 1, 1, 0, 0, 0)",
        "INSERT INTO releases VALUES (1, 1, 'sha256:1', 'base', 'canary', '', '', 0, 0, 0, 1)",
        "UPDATE releases SET step = 1",
        "INSERT INTO grants VALUES ('acme', 'a', 'globex', 0, NULL, NULL)",
        "UPDATE grants SET end_ns = 1",
        "DELETE FROM aliases",
        "DELETE FROM adapters WHERE id = 1",
    ):
        write(database, statement)
        assert news.look() == ["a"], statement
        assert news.look() == []
    write(database, "INSERT INTO webhooks VALUES ('w', 1)")
    assert news.look() == []
    with suppress(ZeroDivisionError), database.transaction() as rows:
        rows.execute("UPDATE adapters SET changes = 2")
        assert news.look() == [], "it is not committed"
        raise ZeroDivisionError
    assert news.look() == []


def test_a_grant_that_ends_by_its_time_is_told(database: Database) -> None:
    now_ns = 100
    grants = Grants(database, 0.0, clock=lambda: now_ns)
    grants.create(AdapterName("acme", "a"), "globex", 5e-9)
    news = News(database.adapter_changes)
    grants.note_expired()
    assert news.look() == []
    now_ns = 105
    grants.note_expired()
    assert news.look() == ["a"]
    grants.note_expired()
    assert news.look() == []


def test_a_reader_of_more_changes_than_are_kept_begins_anew() -> None:
    changes = AdapterChanges(limit=2)
    news = News(changes)
    changes.publish(["a", "b", "a"])
    assert news.look() == ["a", "b"]
    changes.publish(["c"])
    assert news.look() is None
    assert news.look() == []
