"""Placement of a job: the workers that it prefers, and what the load of its adapter is charged as."""

from __future__ import annotations

from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from broker.messages import AdapterRef, Job, StoppingParams
from broker.rendezvous import WorkerLoad, preferred
from broker.terms import KeyTerms, Placement
from broker.worker_state import WorkerPhase, WorkerState
from router.app import _dispatcher
from router.dispatch.outbox import MIB, Placer
from router.dispatch.worker_links import RelayReach
from router.metrics import RouterMetrics
from router.quotas.plans import Plans
from router.settings import Settings
from rpc.principal import CredentialKind, Principal, Role, set_caller

JOB = Job("j", "acme", "tiny", "sha256:0", "here", (1, 2), StoppingParams(100), 1, request_id="j")


def worker(worker_id: str, *, used: int, max_rank: int = 64) -> WorkerState:
    kinds = {"int": 0, "str": ""}
    rest: dict[str, Any] = {name: kinds[kind] for name, kind in WorkerState.__annotations__.items() if kind in kinds}
    rest |= {"worker_id": worker_id, "rows_running": used, "rows_limit": 8, "max_rank": max_rank, "max_tokens": 1000}
    return WorkerState(phase=WorkerPhase.SERVING, adapters=(), **rest)


def test_a_job_prefers_able_workers_and_pays_for_its_adapter() -> None:
    states = [worker("busy", used=8), worker("free", used=0), worker("small", used=0, max_rank=8)]
    placer = Placer(lambda *_: states, lambda tenant: 2.0 if tenant == "acme" else 1.0, 10.0)
    adapter = AdapterRef("r", "sha256:a", 16, 3 * MIB)
    assert placer.place(replace(JOB, adapter=adapter)) == Placement(2.0, ("free",), 30.0)
    assert placer.place(replace(JOB, tenant="other")) == Placement(1.0)
    terms = KeyTerms("k1", 2.0, 0.5)
    keyed = Placer(lambda *_: states, lambda tenant: 1.0, 10.0, calling_key_terms=lambda: terms)
    assert keyed.place(JOB) == Placement(key=terms)
    assert keyed.place(replace(JOB, attempt=2)) == Placement(), "no call dispatches later attempts"
    loads = [WorkerLoad(name, 0, 8) for name in ("free", "small", "busy")]
    states[0] = worker("busy", used=0)
    small = replace(JOB, adapter=replace(adapter, rank=8))
    assert placer.place(small).prefer == preferred("sha256:a", loads)


def test_the_router_places_jobs_by_the_plan_of_the_calling_key(tmp_path: Path) -> None:
    (tmp_path / "plans.toml").write_text("[keys.k1]\nweight = 3\nqueue_share = 0.5\n[keys.k2]\ntokens_per_day = 1\n")
    models: Any = SimpleNamespace(queue_of=None, serving=None, why_unservable=None)  # asked for jobs with an adapter
    settings, metrics = Settings(store="s", redis_url="r"), RouterMetrics()
    dispatcher = _dispatcher(settings, models, RelayReach(metrics), Plans(tmp_path / "plans.toml"), metrics)

    def placed(key: str) -> Placement:
        roles = frozenset({Role.TENANT_USER})
        set_caller(Principal("someone", roles, CredentialKind.API_KEY, "acme", key_id=key))
        return dispatcher._place(JOB)

    assert copy_context().run(placed, "k1") == Placement(key=KeyTerms("k1", 3.0, 0.5))
    assert copy_context().run(placed, "k2") == Placement()
    assert dispatcher._place(JOB) == Placement()
