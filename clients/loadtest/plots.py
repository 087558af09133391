"""Which plots a report has: of a sweep, and of each run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clients.loadtest.svg import Axis, Series, Strip, bars, linear, lines, logarithmic, strips

Plot = tuple[str, str]


def sweep(runs: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    """Latency against throughput, and both over the value that was swept (after the serving course's plot)."""
    done = [run for run in runs if run["times"]["latency"]["count"]]
    if not done:
        return
    names = [f"{run['sweep_value']:g}" for run in done]
    speed = [run["figures"]["tokens_per_s"] for run in done]
    found = []
    for metric, percentile in (("latency", "p50"), ("latency", "p99"), ("ttft", "p50"), ("ttft", "p99")):
        times = [run["times"][metric][percentile] * 1e3 for run in done]
        label = f"{'TTFT' if metric == 'ttft' else metric} {percentile}"
        found.append(Series(label, list(zip(speed, times, strict=True)), names=names if label == "latency p99" else ()))
    y = logarithmic("milliseconds", [value for one in found for _, value in one.points])
    yield "Latency against throughput", lines(linear("tokens/s", speed), y, found, dots=True)
    kind = "requests at once" if done[0]["loop"] == "closed" else "requests/s"
    values = [run["sweep_value"] for run in done]
    tpot = [(run["times"]["tpot"]["p50"] or 0.0) * 1e3 for run in done]
    yield (
        f"Time per token and throughput over {kind}",
        lines(
            logarithmic(kind, values),
            linear("TPOT p50, milliseconds", tpot),
            [
                Series("TPOT", list(zip(values, tpot, strict=True))),
                Series("tokens/s", list(zip(values, speed, strict=True)), right=True),
            ],
            linear("tokens/s", speed),
            dots=True,
        ),
    )


def run(result: Mapping[str, Any]) -> Iterator[Plot]:
    """Distributions, the timeline, the tenants' shares, and the first streams."""
    for name, title in (("ttft", "TTFT"), ("itl", "ITL: gaps between messages"), ("latency", "Latency")):
        found = result["histograms"][name]
        if found["counts"]:
            bounds = [bound * 1e3 for bound in found["bounds_s"]]
            spread = result["times"][name]
            marks = [(percentile, spread[percentile] * 1e3) for percentile in ("p50", "p90", "p99")]
            x = Axis("milliseconds", bounds[0], bounds[-1], log=True)
            yield (
                title,
                bars(x, bounds, found["counts"], [mark for mark in marks if bounds[0] <= mark[1] <= bounds[-1]]),
            )
    yield from _timeline(result["timeline"])
    yield from _tenants(result["tenants"])
    yield from _streams(result["streams"])


def _timeline(timeline: Mapping[str, Sequence[float]]) -> Iterator[Plot]:
    if not timeline:
        return
    at = timeline["at_s"]
    x = Axis("seconds", 0.0, at[-1])
    rates = {"sent/s": "sent_per_s", "ended/s": "ended_per_s", "errors/s": "errors_per_s", "running": "running"}
    series = [Series(name, list(zip(at, timeline[key], strict=True))) for name, key in rates.items()]
    yield (
        "Requests over time",
        lines(x, linear("requests, or requests/s", [v for one in series for _, v in one.points]), series),
    )
    ttft = [value * 1e3 for value in timeline["ttft_p50_s"]]
    yield (
        "Messages and TTFT over time",
        lines(
            x,
            linear("messages/s", timeline["messages_per_s"]),
            [
                Series("messages/s", list(zip(at, timeline["messages_per_s"], strict=True))),
                Series("TTFT p50, ms", list(zip(at, ttft, strict=True)), right=True),
            ],
            linear("TTFT p50, milliseconds", ttft),
        ),
    )


def _tenants(tenants: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    if len(tenants) < 2:
        return
    rows = []
    for number, tenant in enumerate(tenants[:24]):
        for what, key in (("asked", "request_share"), ("got", "token_share")):
            share = (tenant[key] or 0.0) * 100
            title = f"{tenant['tenant']}: {share:.1f}% of {'requests' if what == 'asked' else 'tokens'}"
            name = tenant["tenant"] if what == "asked" else ""
            rows.append(Strip(name, 0.0, share, (0.0,), number if what == "got" else 7, title))
    longest = max(row.end for row in rows) or 1.0
    yield (
        "Tenants: % of requests asked (above), of tokens delivered (below)",
        strips(Axis("%", 0, longest * 1.05), rows),
    )


def _streams(streams: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    if not streams:
        return
    begin = min(stream["intended_s"] for stream in streams)
    tones = {key: number for number, key in enumerate(dict.fromkeys((s["tenant"], s["adapter"]) for s in streams))}
    many = len(tones) > 1
    rows = []
    for number, stream in enumerate(streams):
        who = stream["adapter"] or "base"
        messages = [(at - begin) * 1e3 for at in stream["messages_s"]]
        title = f"request {stream['index']}, {stream['tenant']}, {who}: {len(messages)} messages, {stream['status']}"
        tone = tones[stream["tenant"], stream["adapter"]] if many else number
        span = ((stream["intended_s"] - begin) * 1e3, (stream["end_s"] - begin) * 1e3)
        rows.append(Strip(who if many else f"#{stream['index']}", *span, messages, tone, title))
    end = max(row.end for row in rows)
    yield (
        "The first streams: grey until the first token, a tick for each message",
        strips(Axis("milliseconds", 0, end), rows),
    )
    gaps = [
        (at + 1, later - earlier)
        for at, (earlier, later) in enumerate(zip(rows[0].ticks, rows[0].ticks[1:], strict=False))
    ]
    if rows[0].ticks:
        first = [(0.0, rows[0].ticks[0] - rows[0].begin), *((float(at), gap) for at, gap in gaps)]
        y = linear("milliseconds", [value for _, value in first])
        x = Axis("message", 0.0, max(1.0, float(len(first))))
        yield (
            "One stream: its first token with the prefill, then each gap",
            lines(x, y, [Series("gap", first)], dots=True),
        )
