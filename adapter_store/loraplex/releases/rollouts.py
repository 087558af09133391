"""Releases as the store keeps them: their states, and the plan of a rollout with the rules that end it.

imported ──▶ verified ◀──▶ qualified ──▶ canary ──▶ live ──▶ retired
                 │             │            │         │ ▲──────┘
                 └──▶ retired ◀┘            └─▶ rolled back
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from loraplex.contracts.artifacts.names import AdapterName
from loraplex.contracts.artifacts.outcomes import StepOutcomes


class ReleaseState(StrEnum):
    """A state of a release; releases.proto says what each means."""

    IMPORTED = "imported"
    VERIFIED = "verified"
    QUALIFIED = "qualified"
    CANARY = "canary"
    LIVE = "live"
    RETIRED = "retired"
    ROLLED_BACK = "rolled back"


_S = ReleaseState
# A rollback makes a retired release live again; an alias that is moved by hand makes any live.
ALLOWED: Mapping[ReleaseState, frozenset[ReleaseState]] = {
    _S.IMPORTED: frozenset({_S.VERIFIED, _S.LIVE, _S.RETIRED}),
    _S.VERIFIED: frozenset({_S.VERIFIED, _S.QUALIFIED, _S.LIVE, _S.RETIRED}),
    _S.QUALIFIED: frozenset({_S.VERIFIED, _S.QUALIFIED, _S.CANARY, _S.LIVE, _S.RETIRED}),
    _S.CANARY: frozenset({_S.CANARY, _S.LIVE, _S.ROLLED_BACK}),
    _S.LIVE: frozenset({_S.RETIRED, _S.ROLLED_BACK}),
    _S.RETIRED: frozenset({_S.LIVE}),
    _S.ROLLED_BACK: frozenset(),
}


@dataclass(frozen=True, slots=True)
class ReleaseName:
    """The full name of a release; an adapter's releases are numbered from 1."""

    adapter: AdapterName
    number: int

    def __str__(self) -> str:
        return f"{self.adapter}/releases/{self.number}"


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a revision and its training run, as its uploader names them."""

    source: str = ""
    pin: str = ""
    parent_digest: str = ""
    run_id: str = ""
    datasets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GateResult:
    """The result of a gate: figures by name, and why it did not pass."""

    name: str
    passed: bool
    figures: dict[str, float] = field(default_factory=dict)
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """A step of a rollout: the candidate's share in 1/1000, and what ends the step; both 0: a call."""

    permille: int
    requests: int = 0
    seconds: int = 0

    def has_passed(self, outcomes: StepOutcomes, elapsed_s: float) -> bool:
        """Tell whether the step has ended."""
        if not (self.requests or self.seconds):
            return False
        answered = outcomes.candidate.requests if self.permille else outcomes.shadow.requests
        return answered >= self.requests and elapsed_s >= self.seconds


@dataclass(frozen=True, slots=True)
class RolloutRules:
    """Limits of a rollout, as releases.proto has them; None: no rule."""

    min_requests: int = 20
    max_error_rise: float | None = None
    max_ttft_ratio: float | None = None
    max_refusal_rise: float | None = None
    min_agreement: float | None = None

    def broken(self, figures: Mapping[str, float]) -> str:
        """Return the first rule that the figures of a step break, with both numbers; empty: none."""
        least = self.min_requests
        if figures["candidate_requests"] >= least:
            for rule, limit, rate in (
                ("max_error_rise", self.max_error_rise, "error_rate"),
                ("max_refusal_rise", self.max_refusal_rise, "refusal_rate"),
            ):
                rise = figures[f"candidate_{rate}"] - figures[f"live_{rate}"]
                if limit is not None and rise > limit:
                    return f"{rule} {limit:g}: {rise:.4g}"
            if self.max_ttft_ratio is not None and figures["live_requests"] >= least and figures["live_ttft_ms"]:
                ratio = figures["candidate_ttft_ms"] / figures["live_ttft_ms"]
                if ratio > self.max_ttft_ratio:
                    return f"max_ttft_ratio {self.max_ttft_ratio:g}: {ratio:.4g}"
        agreement = figures["agreement"] if figures.get("shadow_requests", 0) >= least else math.inf
        if self.min_agreement is not None and agreement < self.min_agreement:
            return f"min_agreement {self.min_agreement:g}: {agreement:.4g}"
        return ""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """The steps and rules of a rollout."""

    steps: tuple[RolloutStep, ...]
    rules: RolloutRules = RolloutRules()
    shadow_permille: int = 0
    refusal_phrases: tuple[str, ...] = ()
    # The secret key of the hash that splits requests.
    split_key: str = ""


@dataclass(frozen=True, slots=True)
class ReleaseEvent:
    """A change of a release: who made it, why, and the figures that decided. `time_ns` is since 1970."""

    time_ns: int
    before: ReleaseState | None
    after: ReleaseState
    actor: str
    cause: str
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Release:
    """A release. `baseline` is the digest that was live before it; `step` and `step_ns` are those of its rollout.

    `change` grows with every change of any release. `outcomes` are those of the current step.
    """

    name: ReleaseName
    adapter_id: int
    digest: str
    base_digest: str
    state: ReleaseState
    origin: Origin
    create_ns: int
    change: int
    signer: str = ""
    gates: tuple[GateResult, ...] = ()
    plan: RolloutPlan | None = None
    baseline: str = ""
    step: int = 0
    step_ns: int = 0
    outcomes: StepOutcomes = field(default_factory=StepOutcomes)
    history: tuple[ReleaseEvent, ...] = ()

    @property
    def etag(self) -> str:
        """Return the etag, which changes with every change of the release."""
        return str(self.change)
