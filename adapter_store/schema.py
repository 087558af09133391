"""The tables of the catalog's SQLite file."""

from __future__ import annotations

VERSION = 1
SCHEMA = f"""
BEGIN;
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
    UNIQUE (adapter_id, digest)
);
CREATE INDEX revisions_by_config ON revisions (config_digest);
CREATE INDEX revisions_by_weights ON revisions (weights_digest);
CREATE TABLE aliases (
    adapter_id INTEGER NOT NULL,
    alias TEXT NOT NULL,
    digest TEXT NOT NULL,
    PRIMARY KEY (adapter_id, alias),
    FOREIGN KEY (adapter_id, digest) REFERENCES revisions (adapter_id, digest) ON DELETE CASCADE
);
CREATE TABLE base_models (
    name TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    manifest TEXT NOT NULL,
    create_ns INTEGER NOT NULL
);
CREATE TABLE base_files (
    model TEXT NOT NULL REFERENCES base_models (name) ON DELETE CASCADE,
    name TEXT NOT NULL,
    digest TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (model, name)
);
CREATE INDEX base_files_by_digest ON base_files (digest);
PRAGMA user_version = {VERSION};
COMMIT;
"""
# Tables of later than the schema's version, which stays the same: an older store leaves them alone.
_DELETED_REVISIONS = """
CREATE INDEX IF NOT EXISTS revisions_by_digest ON revisions (digest);
CREATE TABLE IF NOT EXISTS deleted_revisions (
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
CREATE INDEX IF NOT EXISTS deleted_by_config ON deleted_revisions (config_digest);
CREATE INDEX IF NOT EXISTS deleted_by_weights ON deleted_revisions (weights_digest);
"""
_CERTIFICATES = """
CREATE TABLE IF NOT EXISTS certificates (
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
    PRIMARY KEY (adapter_id, digest, base_digest, quantization),
    FOREIGN KEY (adapter_id, digest) REFERENCES revisions (adapter_id, digest) ON DELETE CASCADE
);
"""
# API keys, as deleted revisions. `change` grows with every change of a key: routers ask for what came after theirs.
_API_KEYS = """
CREATE TABLE IF NOT EXISTS api_keys (
    key_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    role TEXT NOT NULL,
    scopes TEXT NOT NULL,
    label TEXT NOT NULL,
    create_ns INTEGER NOT NULL,
    expire_ns INTEGER,
    revoke_ns INTEGER,
    change INTEGER NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS api_keys_by_change ON api_keys (change);
CREATE TABLE IF NOT EXISTS api_key_secrets (
    key_id TEXT NOT NULL REFERENCES api_keys (key_id) ON DELETE CASCADE,
    sha256 BLOB NOT NULL,
    create_ns INTEGER NOT NULL,
    expire_ns INTEGER,
    PRIMARY KEY (key_id, sha256)
);
"""
# Tenants that may use another's adapter. By names, so that a grant outlives the adapter for the answers that run.
_GRANTS = """
CREATE TABLE IF NOT EXISTS grants (
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    grantee TEXT NOT NULL,
    create_ns INTEGER NOT NULL,
    expire_ns INTEGER,
    end_ns INTEGER,
    PRIMARY KEY (tenant, adapter, grantee)
);
CREATE INDEX IF NOT EXISTS grants_by_grantee ON grants (grantee);
"""
# Plans by name, as JSON; none where one was deleted, which readers learn by its change, as those of keys.
_PLANS = """
CREATE TABLE IF NOT EXISTS plans (
    name TEXT PRIMARY KEY,
    plan TEXT,
    change INTEGER NOT NULL
);
"""
# API keys that revisions were uploaded with; no row for a revision that came without a key or before this table.
_REVISION_KEYS = """
CREATE TABLE IF NOT EXISTS revision_keys (
    adapter_id INTEGER NOT NULL,
    digest TEXT NOT NULL,
    key_id TEXT NOT NULL,
    PRIMARY KEY (adapter_id, digest),
    FOREIGN KEY (adapter_id, digest) REFERENCES revisions (adapter_id, digest) ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS revision_keys_by_key ON revision_keys (key_id);
"""
# Charges of tenants and API keys, saved by routers. A purge of a tenant keeps them, because they bound its quotas.
_ACCOUNTS = """
CREATE TABLE IF NOT EXISTS accounts (
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
"""
LATER_TABLES = _DELETED_REVISIONS + _CERTIFICATES + _API_KEYS + _GRANTS + _PLANS + _REVISION_KEYS + _ACCOUNTS
