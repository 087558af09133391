"""A verdict as a table for people, as JSON, and as an exit code."""

from __future__ import annotations

from typing import Any

from tests.trials.chaos.verdict import Verdict

# The longest p99 of the silence of a stream that such a fault hit, in ms, where faults come one at a time.
AIMS_MS = {"worker_kill": 1_000, "engine_kill": 1_000, "worker_hang": 4_000, "engine_hang": 4_000}
_COUNTS = ("requests", "completed", "refused", "lost", "duplicated", "reordered", "wrong_adapter")


def percentile(values: list[float], share: float) -> float:
    """The value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return the content of `make chaos JSON=FILE`."""
    left = verdict.left
    return {
        **{name: getattr(verdict, name) for name in (*_COUNTS, "stale_attempt_delivered")},
        "crowd": dict(verdict.crowd),
        "refusals": dict(verdict.refusals.most_common()),
        "faults": {kind: verdict.faults[kind] for kind in verdict.planned},
        "token_gap_ms": {kind: _gap(verdict.gaps[kind]) for kind in verdict.planned if verdict.gaps.get(kind)},
        "ledger": {
            "client_tokens": verdict.client_tokens,
            "their_event_tokens": verdict.charged_tokens,
            "all_event_tokens": verdict.event_tokens,
            "account_tokens": verdict.account_tokens,
            "miscounted": len(verdict.miscounted),
            "requests_over_quota": verdict.over_quota,
        },
        "leaked": {
            "blocks": left.blocks if left else None,
            "pins": left.pins if left else None,
            "redis_keys": len(left.redis_keys) if left else None,
        },
    }


def _gap(gaps: list[float]) -> dict[str, float]:
    return {name: round(percentile(gaps, share) * 1e3, 1) for name, share in (("p50", 0.50), ("p99", 0.99))}


def missed_aims(verdict: Verdict) -> list[str]:
    """Return the silences that were longer than they may be."""
    gaps = as_json(verdict)["token_gap_ms"]
    return [
        f"p99 of the gap at a {kind}: {gaps[kind]['p99']:.0f} ms, at most {most_ms} wanted"
        for kind, most_ms in AIMS_MS.items()
        if kind in gaps and gaps[kind]["p99"] > most_ms
    ]


def as_lines(verdict: Verdict) -> list[str]:
    """Return the lines that the command prints."""
    values = as_json(verdict)
    lines = [", ".join(f"{values[name]} {name.replace('_', ' ')}" for name in (*_COUNTS, "stale_attempt_delivered"))]
    lines.append(f"{'fault':<18}{'planned':>8}{'fired':>8}{'hit':>8}{'gap p50 ms':>12}{'gap p99 ms':>12}")
    for kind, planned in verdict.planned.items():
        if not planned:
            continue
        gap = values["token_gap_ms"].get(kind)
        shown = f"{gap['p50']:>12.0f}{gap['p99']:>12.0f}" if gap else ""
        lines.append(f"{kind:<18}{planned:>8}{verdict.faults[kind]:>8}{len(verdict.gaps.get(kind, ())):>8}{shown}")
    lines.append("crowds: " + (", ".join(f"{count} calls {how}" for how, count in verdict.crowd.items()) or "none"))
    lines += [f"refused: {count:>8} {how}" for how, count in verdict.refusals.most_common()]
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in values["ledger"].items())
    lines += [f"ledger: {counts}"] if verdict.account_tokens else []
    if verdict.idle_commands_s is not None:
        lines.append(f"idle: {verdict.idle_commands_s:.0f} commands/s")
    lines += [f"late pings: {verdict.late_pings} calls went on elsewhere"] if verdict.late_pings else []
    lines.append("left when idle: " + ", ".join(f"{count} {name}" for name, count in values["leaked"].items()))
    lines += [f"WRONG: {finding}" for finding in verdict.findings[:50]]
    lines += [f"WRONG: {kind} was planned more often than it happened" for kind in verdict.not_fired]
    lines += [f"WRONG: {verdict.faults[kind]} faults of {kind} hit no stream" for kind in verdict.vain]
    if verdict.left and verdict.left.redis_keys:
        lines.append(f"WRONG: keys left: {', '.join(verdict.left.redis_keys[:20])}")
    return lines
