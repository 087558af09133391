"""The operator's process: it follows objects of Kubernetes with kopf, and looks at each whenever it is due.

An object has one task, a timer of kopf that waits for its next look itself: a changed spec, a deletion and a stop end
the wait, and a look that goes on, such as an import. kopf keeps the finalizer and repeats a deletion until it is done.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kopf

from loraplex.operator.objects import AdapterLook, LoraAdapter, ModelObject, delete_adapter, look_at_base
from loraplex.operator.settings import OperatorSettings
from loraplex.operator.store import IMPORT_FAILED_S, SOON_S, Rejected, State, Status, StoreLink, outcome_of
from loraplex.runtime.rpc.settings import SettingsError
from loraplex.runtime.telemetry.metrics import Meters, serve_metrics
from loraplex_client import LoraplexError

log = logging.getLogger(__name__)

GROUP, VERSION = "loraplex.dev", "v1alpha1"
ADAPTERS, BASES = "loraadapters", "basemodels"
# The name in Kubernetes of what holds an object until its adapter is deleted, and of who reports events.
FINALIZER, COMPONENT = f"{GROUP}/operator", "loraplex-operator"
# Where a pod has the token of its service account, and where kubectl has its configuration.
_TOKEN, _KUBECONFIG = "/var/run/secrets/kubernetes.io/serviceaccount/token", "~/.kube/config"
# Pause in seconds before an adapter is deleted whose import was just cancelled: the store may be keeping it right now.
_SETTLE_S = 1.0


class KubernetesGone(Exception):
    """Kubernetes does not answer, or refuses the operator's account; the message is one line."""


class OperatorMetrics(Meters):
    """The metrics of one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = self.gauge("operator_objects", "Objects of Kubernetes, by their state.", ("kind", "state"))
        self.looks = self.counter("operator_looks", "Looks at objects.", ("kind",))
        self.failed = self.counter("operator_looks_failed", "Looks at which the store did not answer.", ("kind",))


@dataclass
class Pace:
    """Times the looks at an object: `again_s` after the last one, or as soon as its spec changes."""

    again_s: float = 0.0
    spec: Mapping[str, Any] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    # Held while a look is due or made, and during the deletion.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    # The last import that was told before it began.
    importing: LoraAdapter | None = None
    # A look was cancelled, and what it had asked of the store may still be carried out.
    cancelled: bool = False

    @classmethod
    def of(cls, memo: Any) -> Pace:
        """Return an object's pace, which kopf keeps as long as the object is there."""
        pace: Pace = memo.setdefault("pace", cls())
        return pace

    def see(self, spec: Mapping[str, Any]) -> None:
        """Take an event of the object into account."""
        if self.spec is not None and spec != self.spec:
            self.changed.set()
        self.spec = spec

    async def run(self, look: Callable[[], Awaitable[Status]], stopped: Any) -> Status | None:
        """Look when it is time; None: the object has changed or is deleted, or the operator stops."""
        async with self.lock:
            pause_s = 0.0 if self.changed.is_set() else self.again_s
            self.changed.clear()
            begun = asyncio.Event()

            async def due() -> Status:
                await asyncio.sleep(pause_s)
                begun.set()
                return await look()

            async def end() -> None:
                await stopped.wait()

            looking = asyncio.create_task(due())
            tasks = [looking, asyncio.create_task(self.changed.wait()), asyncio.create_task(end())]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                outcome = looking.result() if looking.done() else None
                self.again_s = 0.0 if outcome is None else outcome.again_s
                return outcome
            finally:
                self.cancelled = begun.is_set() and not looking.done()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


class Operator:
    """The handlers of kopf."""

    def __init__(self, settings: OperatorSettings, store: StoreLink, metrics: OperatorMetrics) -> None:
        self._tenants_of = settings.tenants_of()
        self._store, self._metrics = store, metrics
        self._look_s = settings.look_s
        # The state of each object, by its uid.
        self._states: dict[str, tuple[str, str]] = {}

    def registry(self) -> kopf.OperatorRegistry:
        """Return what kopf calls."""
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(_login)
        for plural in (ADAPTERS, BASES):
            kopf.index(GROUP, VERSION, plural, id="owners", registry=registry)(self.owner)
            kopf.on.event(GROUP, VERSION, plural, registry=registry)(self.see)
        # Nothing is done for an object before the finalizer is there: its deletion would leave the adapter.
        kopf.timer(GROUP, VERSION, ADAPTERS, interval=0, when=_is_held, registry=registry)(self.follow_adapter)
        kopf.timer(GROUP, VERSION, BASES, interval=0, registry=registry)(self.follow_base)
        kopf.on.delete(GROUP, VERSION, ADAPTERS, registry=registry)(self.delete)
        return registry

    def owner(self, body: kopf.Body, **_: Any) -> Mapping[Any, Any] | None:
        """Index an object by what only one may ask for, with its age. One that asks for too much owns nothing."""
        wanted = _read(body)
        if not wanted.key or self._not_allowed(body, wanted) is not None:
            return None
        name = f"{body.metadata.namespace}/{body.metadata.name}"
        return {wanted.key: (body.metadata.creation_timestamp or "", name, body.metadata.uid)}

    async def see(self, type: str, body: kopf.Body, memo: Any, **_: Any) -> None:  # noqa: A002  # kopf's own name
        """Take an event of an object into account."""
        if type == "DELETED":
            self._note_state(body, None)
        else:
            Pace.of(memo).see(dict(body.spec))

    async def follow_adapter(self, body: kopf.Body, patch: kopf.Patch, memo: Any, **more: Any) -> None:
        """Look at a LoraAdapter when it is time; kopf calls it again at once."""
        pace = Pace.of(memo)

        async def look() -> Status:
            wanted = LoraAdapter.of(body.metadata.name, body.spec)
            if (refused := self._refused(body, wanted, more["owners"])) is not None:
                return outcome_of(refused, {})
            outcome = await AdapterLook(
                self._store, wanted, body.status, pace.importing == wanted, _teller(body)
            ).outcome()
            if outcome.state is State.IMPORTING:
                pace.importing = wanted
            return outcome

        await self._follow(look, body, patch, pace, more["stopped"])

    async def follow_base(self, body: kopf.Body, patch: kopf.Patch, memo: Any, **more: Any) -> None:
        """Look at a BaseModel when it is time; kopf calls it again at once."""

        async def look() -> Status:
            wanted = ModelObject.of(body.metadata.name, body.spec)
            if (refused := self._refused(body, wanted, more["owners"])) is not None:
                return outcome_of(refused, {})
            return await look_at_base(self._store, wanted, _teller(body))

        await self._follow(look, body, patch, Pace.of(memo), more["stopped"])

    async def delete(self, body: kopf.Body, patch: kopf.Patch, memo: Any, **more: Any) -> None:
        """Delete the adapter of a LoraAdapter that goes. Raises TemporaryError until it is done."""
        wanted, pace = LoraAdapter.of(body.metadata.name, body.spec), Pace.of(memo)
        async with pace.lock:
            if wanted.retained or self._refused(body, wanted, more["owners"]) is not None:
                return
            if pace.cancelled:
                await asyncio.sleep(_SETTLE_S)
                pace.cancelled = False
            try:
                deleted = await delete_adapter(self._store, wanted, body.status)
            except LoraplexError as error:
                self._tell(body, patch, outcome_of(error, {}))
                raise kopf.TemporaryError(f"{wanted.name} is not deleted: {error.message}", delay=SOON_S) from error
            log.info("%s %s", "deleted" if deleted else "left", wanted.name)

    async def _follow(
        self,
        look: Callable[[], Awaitable[Status]],
        body: kopf.Body,
        patch: kopf.Patch,
        pace: Pace,
        stopped: Any,
    ) -> None:
        generation = 0

        async def look_now() -> Status:
            nonlocal generation
            generation = body.metadata.get("generation", 0)
            return await look()

        if (outcome := await pace.run(look_now, stopped)) is not None:
            if outcome.again_s != IMPORT_FAILED_S:
                pace.again_s = min(outcome.again_s, self._look_s)
            self._metrics.looks.labels(body["kind"]).inc()
            self._tell(body, patch, outcome, generation)

    def _tell(self, body: kopf.Body, patch: kopf.Patch, outcome: Status, generation: int | None = None) -> None:
        """Write an object's status if it has changed, and an event for the change."""
        kind, former = body["kind"], body.status
        ready = _condition(former, "Ready") or {}
        if outcome.state is State.UNKNOWN:
            self._metrics.failed.labels(kind).inc()
        status = _status(former, outcome, ready.get("observedGeneration", 0) if generation is None else generation)
        patch.status.update({name: value for name, value in status.items() if former.get(name) != value})
        self._note_state(body, status["state"])
        if (former.get("state"), ready.get("reason")) != (status["state"], outcome.reason):
            name = f"{kind} {body.metadata.namespace}/{body.metadata.name}"
            log.log(
                logging.WARNING if outcome.warns else logging.INFO, "%s: %s: %s", name, outcome.reason, outcome.message
            )
            event_type = "Warning" if outcome.warns else "Normal"
            kopf.event(body, type=event_type, reason=outcome.reason, message=outcome.message)

    def _refused(
        self, body: kopf.Body, wanted: LoraAdapter | ModelObject, owners: Mapping[Any, Any]
    ) -> Rejected | None:
        """Return why an object's requests are not carried out."""
        if (refused := self._not_allowed(body, wanted)) is not None:
            return refused
        first = min(owners.get(wanted.key, ()), default=None)
        if first is None or first[2] == body.metadata.uid:
            return None
        return Rejected("Conflict", f"{first[1]} asks for {'/'.join(wanted.key[1:])} already; delete one of the two")

    def _not_allowed(self, body: kopf.Body, wanted: LoraAdapter | ModelObject) -> Rejected | None:
        """Return the refusal of what an object's namespace may not ask for."""
        namespace = body.metadata.namespace or ""
        if not (tenants := self._tenants_of.get(namespace)):
            return None
        more = "; the chart's value operator.namespaces, or --namespaces of the operator, allows more"
        if isinstance(wanted, ModelObject):
            message = f"spec.digest: {namespace} is for adapters of some tenants, and base models are everybody's{more}"
            return Rejected("DigestNotAllowed", message) if wanted.digest else None
        if wanted.tenant in tenants:
            return None
        message = f"spec.tenant: objects of {namespace} may have adapters of {', '.join(sorted(tenants))} alone{more}"
        return Rejected("TenantNotAllowed", message)

    def _note_state(self, body: kopf.Body, state: str | None) -> None:
        uid, kind = str(body.metadata.uid), body["kind"]
        if (former := self._states.pop(uid, None)) is not None:
            self._metrics.objects.labels(*former).dec()
        if state is not None:
            self._states[uid] = (kind, state)
            self._metrics.objects.labels(kind, state).inc()


def _read(body: kopf.Body) -> LoraAdapter | ModelObject:
    kind: type[LoraAdapter] | type[ModelObject] = LoraAdapter if body["kind"] == "LoraAdapter" else ModelObject
    return kind.of(body.metadata.name, body.spec)


def _is_held(meta: kopf.Meta, **_: Any) -> bool:
    return FINALIZER in meta.get("finalizers", ())


def _login(**given: Any) -> kopf.ConnectionInfo | None:
    """Return how Kubernetes is called: as the pod's service account, or as kubectl does it."""
    return kopf.login_with_service_account(**given) or kopf.login_with_kubeconfig(**given)


def _teller(body: kopf.Body) -> Callable[[str, str], None]:
    return lambda reason, message: kopf.event(body, type="Normal", reason=reason, message=message)


def _condition(status: Mapping[str, Any], type_: str) -> Mapping[str, Any] | None:
    conditions: list[Mapping[str, Any]] = status.get("conditions", [])
    return next((one for one in conditions if one["type"] == type_), None)


def _status(former: Mapping[str, Any], outcome: Status, generation: int) -> dict[str, Any]:
    """Return the status of an object; a state that is not known is the last one that was."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    conditions = []
    for type_, value in (("Ready", outcome.ready), ("Stalled", str(outcome.stalled))):
        last = _condition(former, type_)
        condition = {
            "type": type_,
            "status": value,
            "reason": outcome.reason,
            "message": outcome.message,
            "observedGeneration": generation,
            "lastTransitionTime": last["lastTransitionTime"] if last and last["status"] == value else now,
        }
        conditions.append(condition)
    known = outcome.state is not State.UNKNOWN
    state = outcome.state if known else former.get("state", outcome.state)
    return {"state": str(state), "observedGeneration": generation, "conditions": conditions, **outcome.fields}


def kopf_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: our names in Kubernetes, and no rights beyond the namespaces."""
    settings = kopf.OperatorSettings()
    settings.persistence.finalizer = FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    settings.posting.reporting_component, settings.posting.event_name_prefix = COMPONENT, f"{COMPONENT}-"
    settings.scanning.disabled = settings.peering.standalone = True
    return settings


async def run(settings: OperatorSettings) -> None:
    """Follow the objects until SIGTERM or SIGINT.

    Raises KubernetesGone, and before it follows any SettingsError, MetricsPortError or InvalidRequestError.
    """
    _check_kubernetes()
    # kopf tells at level info of every look.
    logging.getLogger("kopf").setLevel(logging.DEBUG if settings.log_level == "debug" else logging.WARNING)
    metrics, store, ready = OperatorMetrics(), StoreLink(settings.store), asyncio.Event()
    metrics_server = serve_metrics(metrics, settings.host, settings.metrics_port)
    telling = asyncio.create_task(_say_ready(ready, settings, metrics))
    operator = Operator(settings, store, metrics)
    try:
        await kopf.operator(
            registry=operator.registry(),
            settings=kopf_settings(),
            namespaces=sorted(settings.tenants_of()),
            ready_flag=ready,
        )
    except Exception as error:  # of any class of kopf's own and aiohttp's, after a minute of tries
        raise KubernetesGone(f"Kubernetes cannot be called: {' '.join(str(error).split())}") from error
    finally:
        metrics.health.stop()
        telling.cancel()
        await store.close()
        if metrics_server is not None:
            await asyncio.to_thread(metrics_server.close)


def _check_kubernetes() -> None:
    """Raise SettingsError where there is nothing that names a Kubernetes."""
    kubeconfig = os.environ.get("KUBECONFIG") or str(Path(_KUBECONFIG).expanduser())
    if not any(Path(path).is_file() for path in (_TOKEN, *kubeconfig.split(os.pathsep))):
        raise SettingsError(f"KUBECONFIG: there is no file {kubeconfig}, nor a pod's service account: name one")


async def _say_ready(ready: asyncio.Event, settings: OperatorSettings, metrics: OperatorMetrics) -> None:
    await ready.wait()
    metrics.health.set()
    print(f"ready operator={','.join(sorted(settings.tenants_of()))}{metrics.ready_word}", flush=True)
