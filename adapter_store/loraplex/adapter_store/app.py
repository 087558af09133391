"""The store's process: opens the data directory, the catalog and the server, and closes them in reverse order."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Sequence, Set
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import grpc
from loraplex.adapters.v1 import adapters_pb2_grpc as pb_grpc

from loraplex.adapter_store.accounts import AccountService, StoredAccounts
from loraplex.adapter_store.api_keys import ApiKeys, KeyService
from loraplex.adapter_store.bases import BaseModels
from loraplex.adapter_store.catalog import Catalog
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.deleted import DeletedRevisions
from loraplex.adapter_store.embedded import open_database
from loraplex.adapter_store.grants import Grants, GrantService
from loraplex.adapter_store.metrics import StoreMetrics
from loraplex.adapter_store.open_calls import TenantCalls
from loraplex.adapter_store.plans import PlanService, StoredPlans, StoreQuotas
from loraplex.adapter_store.purge import TenantPurge, TenantService
from loraplex.adapter_store.receive import Receiver
from loraplex.adapter_store.records import FitnessPolicy
from loraplex.adapter_store.removals import KEY, TENANT, Removals
from loraplex.adapter_store.service import AdapterService, WorkerGrants
from loraplex.adapter_store.storage import DataDirectory
from loraplex.admin.v1 import accounts_pb2_grpc, grants_pb2_grpc, keys_pb2_grpc, plans_pb2_grpc, tenants_pb2_grpc
from loraplex.contracts.artifacts.fitness import FitnessLimits
from loraplex.runtime.interpreter import StartError
from loraplex.runtime.rpc.errors import CallError, NotFound
from loraplex.runtime.rpc.interceptors import CallMeter
from loraplex.runtime.rpc.principal import Principal
from loraplex.runtime.rpc.server import Server, stop_signal
from loraplex.runtime.rpc.settings import check_bounds, setting
from loraplex.runtime.rpc.tasks import every
from loraplex.runtime.telemetry.logging import (
    FORMAT_HELP,
    FORMAT_VARIABLE,
    LEVEL_HELP,
    LEVEL_VARIABLE,
    LogOnce,
    check_logging,
)
from loraplex.runtime.telemetry.metrics import PORT_HELP, serve_metrics
from loraplex.runtime.tenancy.access import AccessSettings, GuardedServers
from loraplex.runtime.tenancy.api_keys import USED_AT_ONCE, KeyDirectory
from loraplex.runtime.tenancy.audit_log import FILE_HELP, AuditLog
from loraplex.runtime.tenancy.auditor import WINDOW_S, Auditor
from loraplex.runtime.tenancy.certificates import end_of
from loraplex.runtime.tenancy.permissions import Port

# Answers to requests for an adapter whose certificate breaks the limits: an error, or a warning in the log.
REFUSE, WARN = "refuse", "warn"
log = logging.getLogger(__name__)

# Modules of imports and exports, of releases, and of batches, which are at the edge.
TRANSFERS, RELEASES = "loraplex.transfers.transfers", "loraplex.releases.service"
BATCHES = "loraplex.batch_store.service"
# Time in seconds for which running uploads and downloads go on after SIGTERM; then they are cancelled.
DRAIN_S = 10.0
# Interval in seconds between looks for deleted revisions whose time has passed.
PURGE_S = 60.0
# Timeout in seconds of a request for a file of the bucket.
BLOB_S = 3600.0
# Interval in seconds between looks whether changes of other stores are heard, and the time for which they may not be.
HEARD_LOOK_S, OLD_S = 0.2, 30.0
# Interval in seconds between looks for revisions with a time to live that has passed.
EXPIRY_S = 1.0
# Interval in seconds between saves of when API keys were used last, which a store that is killed forgets.
KEY_USES_S = 60.0


@dataclass(frozen=True)
class StoreSettings(AccessSettings):
    """Keeps adapters and base models' manifests, in a directory or in a bucket, and serves them over gRPC."""

    data: Path = setting("directory of all data, made if missing; what --bucket or --database keeps is not in it")
    bucket: str = setting(
        "s3://BUCKET/FOLDER, gs:// or az:// for adapters' files; credentials are in the provider's variables "
        "(AWS_ACCESS_KEY_ID, ...); empty: --data",
        "",
    )
    database: str = setting(
        "postgresql:// URL of the catalog, shared by several stores with one --bucket; empty: SQLite in --data", ""
    )
    removals: str = setting(
        "directory or bucket URL, best beside the backups, that has purges and revoked keys for catalogs that are "
        "restored; empty: a folder beside the files",
        "",
    )
    host: str = setting("address to listen on", "127.0.0.1")
    port: int = setting("port to listen on; 0: any free port", 50052)
    max_adapter_bytes: int = setting("maximum bytes of a safetensors file", 4 * 1024**3, least=1)
    keep_deleted_s: float = setting(
        "seconds that a deleted adapter's files are kept for running answers",
        3600.0,
    )
    fitness_max_drop: float = setting(
        "maximum share of the answers to an adapter's own prompts that a quantized base may change or get wrong",
        0.05,
    )
    fitness_min_agreement: float = setting(
        "minimum share of equal greedy tokens on drawn prompts, on a quantized base", 0.8
    )
    fitness_max_kl: float = setting(
        "maximum mean divergence in nats on drawn prompts, on a quantized base", 0.2, least=0
    )
    fitness_breach: str = setting("what routers do with adapters beyond the fitness limits: refuse or warn", REFUSE)
    sources: str = setting(
        "TOML file of sources that tenants may import from, reread when it changes (docs/guides/adapters.md)",
        "",
    )
    transfer_timeout_s: float = setting("timeout in seconds for an import or an export", 3600.0, above=0)
    signers: str = setting(
        "TOML file of the signers whom tenants' revisions need (docs/guides/releases.md)",
        "",
    )
    webhooks: str = setting(
        "TOML file of URLs that changes of releases and spent budgets are posted to (docs/guides/releases.md)",
        "",
    )
    metrics_port: int = setting(PORT_HELP, 0)
    log_format: str = setting(FORMAT_HELP, "text", variable=FORMAT_VARIABLE)
    log_level: str = setting(LEVEL_HELP, "info", variable=LEVEL_VARIABLE)
    bootstrap_key: str = setting("file with the first operator's API key, made by `loraplex keys bootstrap`", "")
    audit: str = setting(FILE_HELP, "")
    insecure_tenants: bool = setting(
        "listen beyond this machine without credentials, although callers can then act as any tenant", False
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"--port: {self.port} is not a port")
        if not 0 <= self.keep_deleted_s < math.inf:
            raise ValueError(f"--keep-deleted-s: {self.keep_deleted_s} is not a time")
        for name in ("fitness_max_drop", "fitness_min_agreement"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise ValueError(f"--{name.replace('_', '-')}: {share} is not a share from 0 to 1")
        if self.fitness_breach not in {REFUSE, WARN}:
            raise ValueError(f"--fitness-breach: {self.fitness_breach} is neither {REFUSE} nor {WARN}")
        check_bounds(self)
        check_logging(self.log_format, self.log_level)
        self.check_access(self.host, self.insecure_tenants)
        if not self.tls_cert:
            if self.bootstrap_key:
                raise ValueError("--bootstrap-key: needs --tls-cert, --tls-key and --tls-ca")
        elif self.operator_mtls_port is None:
            raise ValueError("--operator-mtls-port: give it with --tls-cert; routers and workers come in there")


class BootstrapKeyError(StartError):
    """A first operator's key that cannot be read; the message is one line."""


class Store:
    """A running store that listens on `port`."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self.metrics = StoreMetrics()
        self._kept = LogOnce(log)
        self.port = 0
        # HOST:PORT, then words like mtls=HOST:PORT.
        self.addresses: Sequence[str] = ()

    async def start(self) -> None:
        """Open the data, listen, serve; an error leaves nothing open.

        Raises DataDirectoryError, SettingsError, SignersError, WebhooksError, AuditFileError or PortInUse.
        """
        await asyncio.to_thread(self._open)
        try:
            deleted = DeletedRevisions(self._database, self._data, self._settings.keep_deleted_s)
            self._server = self._servers()
            self._add_services(deleted)
            await asyncio.to_thread(self._apply_removals)
            self.addresses = self._server.bind(self._settings.host, self._settings.port)
            self.port = int(self.addresses[0].rpartition(":")[2])
            await self._server.start()
            await self._show_health()
            self._purging = asyncio.create_task(every(PURGE_S, partial(_purge_deleted, deleted, self._data)))
            self._following = asyncio.create_task(self._follow())
        except BaseException:
            await asyncio.to_thread(self._close)
            raise

    def _add_services(self, deleted: DeletedRevisions) -> None:
        """Make the services, and let the servers serve them."""
        quotas = StoreQuotas(self._plans, self.metrics)
        catalog = Catalog(self._database, self._data, deleted, quotas, self._releases.releases)
        bases = BaseModels(self._database, self._data)
        self._receiver = Receiver(self._data, catalog, bases, self._settings.max_adapter_bytes, quotas)
        self._transfers = import_module(TRANSFERS).Transfers(
            self._data,
            self._receiver,
            quotas,
            Path(path) if (path := self._settings.sources) else None,
            max_adapter_bytes=self._settings.max_adapter_bytes,
            timeout_s=self._settings.transfer_timeout_s,
        )
        grants = Grants(self._database, self._settings.keep_deleted_s)
        adapters = AdapterService(
            catalog,
            bases,
            self._receiver,
            self._fitness_policy(),
            grants,
            self.metrics,
            self._transfers,
            None if (tls := self._settings.tls_files()) is None else WorkerGrants(tls, self._refused),
        )
        purge = TenantPurge(self._database, self._data, self._keys, self._plans, self._read_all_keys)
        self._purge = purge
        self._remove, self._note_grants = catalog.remove_expired, grants.note_expired
        add = self._server.add
        add(partial(pb_grpc.add_AdapterServiceServicer_to_server, adapters))
        add(partial(keys_pb2_grpc.add_KeyServiceServicer_to_server, KeyService(self._keys)))
        add(partial(grants_pb2_grpc.add_GrantServiceServicer_to_server, GrantService(grants)))
        add(partial(plans_pb2_grpc.add_PlanServiceServicer_to_server, PlanService(self._plans)))
        accounts = AccountService(StoredAccounts(self._database), partial(self._releases.budgets.note, self._plans))
        add(partial(accounts_pb2_grpc.add_AccountServiceServicer_to_server, accounts))
        add(partial(tenants_pb2_grpc.add_TenantServiceServicer_to_server, TenantService(purge)))
        add(lambda server: self._releases.register(server, catalog))
        self._batches = import_module(BATCHES).BatchService(self._database, self._data)
        add(self._batches.register)

    def _apply_removals(self) -> None:
        """Purge and revoke what a restored catalog has back, before anybody can use it."""

        def revoke(key_id: str) -> None:
            with suppress(NotFound):  # its tenant was purged
                self._keys.revoke(key_id)

        if count := self._removals.apply({KEY: revoke, TENANT: self._purge.purge_digest}):
            log.warning("the catalog is an older copy: %d purges and revocations are done again", count)

    async def stop(self, drain_s: float = DRAIN_S) -> None:
        """Refuse new calls, let running ones end for `drain_s`, cancel them, close the data."""
        self.metrics.health.stop()
        await self._server.stop(drain_s)
        await self._transfers.close()
        self._receiver.close()
        for task in (self._purging, self._following):
            task.cancel()
        await asyncio.gather(self._purging, self._following, return_exceptions=True)
        await self._save_key_uses()
        await asyncio.to_thread(self._close)

    def _servers(self) -> GuardedServers:
        meter = CallMeter(*self.metrics.calls)
        bounds: dict[Port, list[grpc.aio.ServerInterceptor]] = {Port.PUBLIC: [TenantCalls()], Port.OPERATORS: []}
        if (tls := self._settings.tls_files()) is not None:
            self.metrics.certificate_end.set_function(lambda: end_of(tls.content.cert, tls.content.ca))
        return GuardedServers(
            self._settings,
            tls,
            lambda guard, port: Server(guard, outer=[meter], interceptors=[*bounds[port], self._auditor]),
            self._directory,
            self._refused,
        )

    def _refused(self, method: str, caller: Principal | None, error: CallError, peer: str) -> None:
        self.metrics.refused.labels(error.reason).inc()
        self._auditor.refused(method, caller, error, peer)

    async def _follow(self) -> None:
        looks = [
            every(WINDOW_S, self._auditor.flush),
            self._releases.follow(),
            self._batches.follow(),
            every(EXPIRY_S, self._remove_expired),
        ]
        if self._settings.database:
            looks.append(every(HEARD_LOOK_S, self._show_health))
        await asyncio.gather(self._server.follow(), every(KEY_USES_S, self._save_key_uses), *looks)

    async def _save_key_uses(self) -> None:
        """Save when API keys were used last, also for calls to the store itself."""
        self._keys.note_used(self._directory.take_used(USED_AT_ONCE))
        try:
            await self._keys.save_uses()
        except CallError as error:  # the disk is full
            log.warning("the last uses of API keys are not saved: %s", error)

    async def _remove_expired(self) -> None:
        try:
            await asyncio.to_thread(self._removals.note)
            await asyncio.to_thread(self._note_grants)
            if removed := await asyncio.to_thread(self._remove):
                log.info("removed %d revisions at the end of their time", removed)
        except CallError as error:  # the disk is full, or the database does not answer
            self._kept(f"revisions whose time has passed are not removed: {error}")
        else:
            self._kept.reset()

    def _fitness_policy(self) -> FitnessPolicy:
        settings = self._settings
        limits = FitnessLimits(settings.fitness_min_agreement, settings.fitness_max_kl, settings.fitness_max_drop)
        return FitnessPolicy(limits, settings.fitness_breach == REFUSE)

    def _open(self) -> None:
        with ExitStack() as opened:
            self._data = opened.enter_context(closing(self._open_data()))
            self._auditor = Auditor(AuditLog(self._settings.audit, "store", self.metrics.audit))
            opened.callback(self._auditor.close)
            self._database = opened.enter_context(closing(self._open_database()))
            self.metrics.catalog_age.set_function(self._database.age_s)
            self._read_keys()
            self._plans = StoredPlans(self._database)
            beside = f"{self._settings.bucket or self._settings.data}/removals"
            self._removals = Removals(self._database, self._settings.removals or beside)
            self._database.follow(self._others_changed)
            settings, record = self._settings, self._auditor.record
            self._releases = import_module(RELEASES).ReleaseService(
                self._database, settings.signers, settings.webhooks, record, self.metrics
            )
            removed = self._data.clean(self._database.referenced_blobs())
            self._data.keep_reserve()
            self.metrics.disk_usage.set_function(self._data.used_share)
            self._close = opened.pop_all().close
        if removed:
            log.info("removed %d unfinished uploads and files without an owner", removed)

    def _open_data(self) -> DataDirectory:
        if not (url := self._settings.bucket):
            return DataDirectory(self._settings.data)
        from loraplex.adapter_store.bucket import BucketDirectory, open_bucket

        return BucketDirectory(self._settings.data, open_bucket(url, BLOB_S), self.metrics.bucket_failures.inc)

    def _open_database(self) -> Database:
        database = open_database(self._settings.database, self._data.catalog_path, self._data.count_blobs())
        if self._settings.bucket:
            from loraplex.adapter_store.bucket import BucketDirectory

            assert isinstance(self._data, BucketDirectory)
            self._data.database = database
        return database

    def _others_changed(self, tables: Set[str] | None) -> None:
        """Read again what other stores have changed, into memory."""
        if tables is None or "purged_keys" in tables:
            self._keys.begin_epoch()
        if tables is None or not tables.isdisjoint({"api_keys", "purged_keys"}):
            self._read_all_keys()
        if tables is None or "plans" in tables:
            self._plans.reload()

    async def _show_health(self) -> None:
        """Say at the probes whether calls are answered, which needs to hear what other stores change."""
        self.metrics.health.set("cannot reach the database" if (old := self._database.age_s() > OLD_S) else "")
        await self._server.set_serving(not old)

    def _read_all_keys(self) -> None:
        with self._database.lock:  # a key that is made meanwhile would be forgotten
            self._directory.put([key.hashed for key in self._keys.changes(0, sys.maxsize)], clear=True)

    def _read_keys(self) -> None:
        self._directory = KeyDirectory()
        self._keys = ApiKeys(self._database, lambda key: self._directory.put([key.hashed]))
        self._read_all_keys()
        if self._settings.bootstrap_key:
            try:
                text = Path(self._settings.bootstrap_key).read_text(encoding="utf-8").strip()
                if (api_key := self._keys.bootstrap(text)) is not None:
                    self._auditor.record("bootstrap key", key_id=api_key.key_id, role=api_key.role.value)
            except (OSError, ValueError) as error:
                raise BootstrapKeyError(f"--bootstrap-key {self._settings.bootstrap_key}: {error}") from error


async def _purge_deleted(deleted: DeletedRevisions, data: DataDirectory) -> None:
    """Remove deleted revisions whose time has passed, and take the reserve again where it was given."""
    try:
        if removed := await asyncio.to_thread(deleted.purge):
            log.info("removed %d revisions of deleted adapters", removed)
        await asyncio.to_thread(data.keep_reserve)
    except CallError as error:  # the disk is full
        log.warning("deleted revisions are not removed: %s", error)


async def serve(settings: StoreSettings) -> None:
    """Run a store until SIGTERM or SIGINT. Raises DataDirectoryError, MetricsPortError, PortInUse."""
    stop = stop_signal()
    store = Store(settings)
    metrics_server = serve_metrics(store.metrics, settings.host_of_operators(settings.host), settings.metrics_port)
    try:
        await store.start()
        print(f"ready store={' '.join(store.addresses)}{store.metrics.ready_word}", flush=True)
        await stop.wait()
        log.info("draining")
        await store.stop()
    finally:
        if metrics_server is not None:
            metrics_server.close()
