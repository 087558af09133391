"""The catalog's database: transactions that are durable when they end. SQLite: embedded.py; PostgreSQL: postgres.py.

Its calls block: make them in a thread.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager

from loraplex.adapter_store.adapter_changes import AdapterChanges
from loraplex.adapter_store.records import Rows
from loraplex.adapter_store.storage import DataDirectory, DataDirectoryError

# The tables, as numbered steps: number n makes a catalog of version n of one of version n - 1, the first, of number
# _FIRST, of an empty one. From version 1.0 on a step that was released stays as it is, and a change of the tables is
# another step at the end. They are what SQLite and PostgreSQL both take, but for names of types (postgres.py).
_FIRST = 6
MIGRATIONS = (
    """
CREATE TABLE adapters (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    base_model TEXT NOT NULL,
    create_ns INTEGER NOT NULL,
    update_ns INTEGER NOT NULL,
    changes INTEGER NOT NULL,
    UNIQUE (tenant, adapter)
);
CREATE TABLE revisions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    adapter_id INTEGER NOT NULL REFERENCES adapters (id) ON DELETE CASCADE,
    digest TEXT NOT NULL,
    base_digest TEXT NOT NULL,
    rank INTEGER NOT NULL,
    config_digest TEXT NOT NULL,
    config_bytes INTEGER NOT NULL,
    weights_digest TEXT NOT NULL,
    weights_bytes INTEGER NOT NULL,
    create_ns INTEGER NOT NULL,
    -- Revisions of training runs end by themselves.
    expire_ns INTEGER,
    UNIQUE (adapter_id, digest)
);
CREATE INDEX revisions_by_digest ON revisions (digest);
CREATE INDEX revisions_by_config ON revisions (config_digest);
CREATE INDEX revisions_by_weights ON revisions (weights_digest);
CREATE INDEX expiring_revisions ON revisions (expire_ns) WHERE expire_ns IS NOT NULL;
CREATE TABLE aliases (
    adapter_id INTEGER NOT NULL,
    alias TEXT NOT NULL,
    digest TEXT NOT NULL,
    PRIMARY KEY (adapter_id, alias),
    FOREIGN KEY (adapter_id, digest) REFERENCES revisions (adapter_id, digest) ON DELETE CASCADE
);
-- A base model has revisions. `live_ns` is when one last became live, NULL for one that never was: the last is live.
CREATE TABLE base_models (
    name TEXT NOT NULL,
    digest TEXT NOT NULL,
    manifest TEXT NOT NULL,
    create_ns INTEGER NOT NULL,
    live_ns INTEGER,
    PRIMARY KEY (name, digest)
);
CREATE TABLE base_files (
    model TEXT NOT NULL,
    revision TEXT NOT NULL,
    name TEXT NOT NULL,
    digest TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (model, revision, name),
    FOREIGN KEY (model, revision) REFERENCES base_models (name, digest) ON DELETE CASCADE
);
CREATE INDEX base_files_by_digest ON base_files (digest);
CREATE TABLE deleted_revisions (
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    digest TEXT NOT NULL,
    number INTEGER NOT NULL,
    base_model TEXT NOT NULL,
    base_digest TEXT NOT NULL,
    rank INTEGER NOT NULL,
    config_digest TEXT NOT NULL,
    config_bytes INTEGER NOT NULL,
    weights_digest TEXT NOT NULL,
    weights_bytes INTEGER NOT NULL,
    create_ns INTEGER NOT NULL,
    delete_ns INTEGER NOT NULL,
    PRIMARY KEY (tenant, adapter, digest)
);
CREATE INDEX deleted_by_config ON deleted_revisions (config_digest);
CREATE INDEX deleted_by_weights ON deleted_revisions (weights_digest);
-- `same_answers` NULL: whole answers were not counted.
CREATE TABLE certificates (
    adapter_id INTEGER NOT NULL,
    digest TEXT NOT NULL,
    base_digest TEXT NOT NULL,
    quantization TEXT NOT NULL,
    prompts INTEGER NOT NULL,
    drawn INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    agreement REAL NOT NULL,
    mean_kl REAL NOT NULL,
    max_kl REAL NOT NULL,
    create_ns INTEGER NOT NULL,
    same_answers INTEGER,
    expected_answers INTEGER NOT NULL DEFAULT 0,
    right_original INTEGER NOT NULL DEFAULT 0,
    right_quantized INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (adapter_id, digest, base_digest, quantization),
    FOREIGN KEY (adapter_id, digest) REFERENCES revisions (adapter_id, digest) ON DELETE CASCADE
);
-- `change` grows with every change of a key: routers ask for what came after theirs.
CREATE TABLE api_keys (
    key_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    role TEXT NOT NULL,
    scopes TEXT NOT NULL,
    label TEXT NOT NULL,
    create_ns INTEGER NOT NULL,
    expire_ns INTEGER,
    revoke_ns INTEGER,
    change INTEGER NOT NULL,
    last_use_ns INTEGER
);
CREATE UNIQUE INDEX api_keys_by_change ON api_keys (change);
CREATE TABLE api_key_secrets (
    key_id TEXT NOT NULL REFERENCES api_keys (key_id) ON DELETE CASCADE,
    sha256 BLOB NOT NULL,
    create_ns INTEGER NOT NULL,
    expire_ns INTEGER,
    PRIMARY KEY (key_id, sha256)
);
-- Tenants that may use another's adapter. By names, so that a grant outlives the adapter for the answers that run.
CREATE TABLE grants (
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    grantee TEXT NOT NULL,
    create_ns INTEGER NOT NULL,
    expire_ns INTEGER,
    end_ns INTEGER,
    PRIMARY KEY (tenant, adapter, grantee)
);
CREATE INDEX grants_by_grantee ON grants (grantee);
-- Plans by name, as JSON; none where one was deleted, which readers learn by its change, as those of keys.
CREATE TABLE plans (
    name TEXT PRIMARY KEY,
    plan TEXT,
    change INTEGER NOT NULL
);
-- API keys that revisions were uploaded with; no row for a revision that came without a key.
CREATE TABLE revision_keys (
    adapter_id INTEGER NOT NULL,
    digest TEXT NOT NULL,
    key_id TEXT NOT NULL,
    PRIMARY KEY (adapter_id, digest),
    FOREIGN KEY (adapter_id, digest) REFERENCES revisions (adapter_id, digest) ON DELETE CASCADE
);
CREATE INDEX revision_keys_by_key ON revision_keys (key_id);
-- Charges of tenants and API keys, saved by routers. A purge of a tenant keeps them: they bound its quotas.
CREATE TABLE accounts (
    name TEXT PRIMARY KEY,
    minute INTEGER NOT NULL,
    requests INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    day INTEGER NOT NULL,
    day_tokens INTEGER NOT NULL,
    month INTEGER NOT NULL,
    month_tokens INTEGER NOT NULL
);
-- Where imported revisions came from, as JSON of records.Provenance.
CREATE TABLE provenance (
    adapter_id INTEGER NOT NULL,
    digest TEXT NOT NULL,
    origin TEXT NOT NULL,
    PRIMARY KEY (adapter_id, digest),
    FOREIGN KEY (adapter_id, digest) REFERENCES revisions (adapter_id, digest) ON DELETE CASCADE
);
-- Where blobs are in a bucket; none of those in a directory.
CREATE TABLE blobs (
    digest TEXT PRIMARY KEY,
    place TEXT NOT NULL
);
-- Releases: loraplex.releases. `change` grows with every change of any release.
CREATE TABLE releases (
    adapter_id INTEGER NOT NULL,
    number INTEGER NOT NULL,
    digest TEXT NOT NULL,
    base_digest TEXT NOT NULL,
    state TEXT NOT NULL,
    record TEXT NOT NULL,
    baseline TEXT NOT NULL,
    step INTEGER NOT NULL,
    step_ns INTEGER NOT NULL,
    create_ns INTEGER NOT NULL,
    change INTEGER NOT NULL,
    PRIMARY KEY (adapter_id, number),
    FOREIGN KEY (adapter_id, digest) REFERENCES revisions (adapter_id, digest) ON DELETE CASCADE
);
CREATE UNIQUE INDEX releases_by_change ON releases (change);
CREATE UNIQUE INDEX canaries ON releases (adapter_id) WHERE state = 'canary';
CREATE UNIQUE INDEX live_releases ON releases (adapter_id) WHERE state = 'live';
CREATE TABLE release_events (
    event INTEGER PRIMARY KEY AUTOINCREMENT,
    adapter_id INTEGER NOT NULL,
    number INTEGER NOT NULL,
    record TEXT NOT NULL,
    FOREIGN KEY (adapter_id, number) REFERENCES releases (adapter_id, number) ON DELETE CASCADE
);
CREATE INDEX events_of_releases ON release_events (adapter_id, number, event);
-- The last event that each webhook has got.
CREATE TABLE webhooks (
    name TEXT PRIMARY KEY,
    event INTEGER NOT NULL
);
-- Sums of routers, each of one run of a router.
CREATE TABLE release_outcomes (
    adapter_id INTEGER NOT NULL,
    number INTEGER NOT NULL,
    step INTEGER NOT NULL,
    reporter TEXT NOT NULL,
    outcomes TEXT NOT NULL,
    PRIMARY KEY (adapter_id, number, step, reporter),
    FOREIGN KEY (adapter_id, number) REFERENCES releases (adapter_id, number) ON DELETE CASCADE
);
""",
    """
CREATE INDEX expiring_grants ON grants (expire_ns) WHERE expire_ns IS NOT NULL;
""",
    """
CREATE TABLE removals (id TEXT PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, noted INTEGER NOT NULL);
""",
    """
ALTER TABLE accounts ADD COLUMN minute_cost INTEGER NOT NULL DEFAULT 0;
ALTER TABLE accounts ADD COLUMN day_cost INTEGER NOT NULL DEFAULT 0;
ALTER TABLE accounts ADD COLUMN month_cost INTEGER NOT NULL DEFAULT 0;
-- Warnings and ends of budgets, once a month of an account, for webhooks; an account is a name as in `accounts`.
CREATE TABLE budget_events (
    event INTEGER PRIMARY KEY AUTOINCREMENT,
    account TEXT NOT NULL,
    month INTEGER NOT NULL,
    kind TEXT NOT NULL,
    record TEXT NOT NULL,
    UNIQUE (account, month, kind)
);
""",
    """
CREATE TABLE calibrations (
    adapter_id INTEGER NOT NULL, digest TEXT NOT NULL, base_digest TEXT NOT NULL, quantization TEXT NOT NULL,
    temperature REAL NOT NULL, questions INTEGER NOT NULL, ece_before REAL NOT NULL, ece_after REAL NOT NULL,
    nll_before REAL NOT NULL, nll_after REAL NOT NULL, create_ns INTEGER NOT NULL,
    PRIMARY KEY (adapter_id, digest, base_digest, quantization),
    FOREIGN KEY (adapter_id, digest) REFERENCES revisions (adapter_id, digest) ON DELETE CASCADE
);
""",
    """
-- Files and batches: loraplex.batch_store. `lease` counts the runners that had a batch; a line has one result.
CREATE TABLE batch_files (number INTEGER PRIMARY KEY AUTOINCREMENT, file TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
    purpose TEXT NOT NULL, digest TEXT NOT NULL, bytes INTEGER NOT NULL, filename TEXT NOT NULL,
    create_ns INTEGER NOT NULL);
CREATE INDEX batch_files_by_digest ON batch_files (digest);
CREATE INDEX batch_files_by_tenant ON batch_files (tenant, number);
CREATE TABLE batches (number INTEGER PRIMARY KEY AUTOINCREMENT, batch TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
    key_id TEXT NOT NULL, input_file TEXT NOT NULL, is_open INTEGER NOT NULL, lease INTEGER NOT NULL,
    lease_end_ns INTEGER NOT NULL, record TEXT NOT NULL);
CREATE INDEX open_batches ON batches (lease_end_ns) WHERE is_open = 1;
CREATE INDEX batches_by_tenant ON batches (tenant, number);
CREATE TABLE batch_results (batch TEXT NOT NULL REFERENCES batches (batch) ON DELETE CASCADE, line INTEGER NOT NULL,
    failed INTEGER NOT NULL, result TEXT NOT NULL, PRIMARY KEY (batch, line));
CREATE INDEX batch_results_by_end ON batch_results (batch, failed, line);
CREATE TABLE batch_events (event INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, record TEXT NOT NULL);
""",
    """
-- Of open batches: leases since the last progress, the time before which no runner gets it, the bytes of its results,
-- and the window's end of one that is being checked.
ALTER TABLE batches ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN wait_end_ns INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN result_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN expire_ns INTEGER;
""",
    """
-- The time until which a suspect that a runner has keeps other suspects waiting.
ALTER TABLE batches ADD COLUMN trial_end_ns INTEGER NOT NULL DEFAULT 0;
""",
)
# The digests and sizes of the blobs that rows need.
BLOBS = (
    "SELECT config_digest, config_bytes FROM revisions UNION SELECT weights_digest, weights_bytes FROM revisions "
    "UNION SELECT digest, bytes FROM base_files UNION SELECT config_digest, config_bytes FROM deleted_revisions "
    "UNION SELECT weights_digest, weights_bytes FROM deleted_revisions UNION SELECT digest, bytes FROM batch_files"
)
_IS_REFERENCED = """
SELECT EXISTS (SELECT 1 FROM revisions WHERE config_digest = :digest)
    OR EXISTS (SELECT 1 FROM revisions WHERE weights_digest = :digest)
    OR EXISTS (SELECT 1 FROM base_files WHERE digest = :digest)
    OR EXISTS (SELECT 1 FROM deleted_revisions WHERE config_digest = :digest)
    OR EXISTS (SELECT 1 FROM deleted_revisions WHERE weights_digest = :digest)
    OR EXISTS (SELECT 1 FROM batch_files WHERE digest = :digest)
"""
# Tables whose rows have a number that the database gives, and that is not given again.
NUMBERED = {"adapters": "id", "revisions": "number", "release_events": "event", "budget_events": "event"}
NUMBERED |= {"batch_files": "number", "batches": "number", "batch_events": "event"}


class Database(ABC):
    """The catalog. One thread changes it at a time, which may hold `lock` around several transactions."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.adapter_changes = AdapterChanges()

    @abstractmethod
    def transaction(self) -> AbstractContextManager[Rows]:
        """Run a transaction: all of it happens or nothing, it is durable when it ends, and no other runs meanwhile.

        Raises Exhausted on a full disk, Unavailable where the database does not answer: it may have happened then.
        """

    @abstractmethod
    def reading(self) -> AbstractContextManager[Rows]:
        """Run a transaction that reads: all that it reads belongs to the same moment. Raises Unavailable."""

    def merging(self) -> AbstractContextManager[Rows]:
        """Run a transaction of statements that are right beside any other's, and so may run beside it."""
        return self.transaction()

    @abstractmethod
    def follow(self, changed: Callable[[Set[str] | None], None]) -> None:
        """Call `changed` with what other stores change: `api_keys`, `plans`, or None for everything."""

    def age_s(self) -> float:
        """Return the time in seconds since `follow` surely told of all changes."""
        return 0.0

    @abstractmethod
    def forget_removed(self) -> None:
        """Overwrite removed rows, where the database can."""

    @abstractmethod
    def numbers(self) -> dict[str, int]:
        """Return the last number that was given, by table of NUMBERED."""

    @abstractmethod
    def set_numbers(self, rows: Rows, numbers: dict[str, int]) -> None:
        """Give later numbers from now on."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""

    def referenced_blobs(self) -> set[str]:
        """Return the digests of all blobs that a row needs."""
        with self.reading() as rows:
            return {row[0] for row in rows.execute(BLOBS)}

    def unreferenced(self, digests: Iterable[str]) -> list[str]:
        """Return which of these blobs no row needs any more."""
        with self.reading() as rows:
            return [digest for digest in digests if not rows.execute(_IS_REFERENCED, {"digest": digest}).fetchone()[0]]

    @contextmanager
    def swept(self, data: DataDirectory, digests: Collection[str]) -> Iterator[None]:
        """Hold the lock for a change, and afterwards remove those of these blobs that no row needs."""
        with self.lock:
            try:
                yield
            finally:
                data.remove(self.unreferenced(digests))


def steps_after(version: int, place: str, blobs: int = 0) -> dict[int, str]:
    """Return the steps that a catalog of a version lacks, by number; 0: an empty one, beside so many files.

    Raises DataDirectoryError for a catalog that has nothing of the files that are there, or is not of these steps.
    """
    steps = dict(enumerate(MIGRATIONS, start=_FIRST))
    if version == 0 and blobs:
        raise DataDirectoryError(
            f"{place} is missing or empty, but there are {blobs} files in the directory's blobs: "
            "restore the catalog from a backup, or move the files away to begin with an empty store"
        )
    if version > max(steps):
        raise DataDirectoryError(f"{place} was written by a later version of the store")
    if 0 < version < _FIRST:
        raise DataDirectoryError(f"{place} is of a version before 1.0; begin with an empty directory or database")
    return {number: step for number, step in steps.items() if number > version}
