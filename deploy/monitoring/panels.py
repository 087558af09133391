"""The panels of the dashboards: what each shows, and the queries behind it."""

from __future__ import annotations

from dataclasses import dataclass

# Grafana's names of units.
SECONDS, SHARE, BYTES, COUNT = "s", "percentunit", "bytes", "short"
PER_SECOND = "ops"


@dataclass(frozen=True)
class Panel:
    """A chart. `queries` are PromQL expressions and the legends of their series."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    meaning: str = ""


@dataclass(frozen=True)
class Dashboard:
    """A dashboard. `variable` is the label that its reader picks a value of, from the series of `metric`."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    variable: str = ""
    metric: str = ""


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Return the query of a counter's increase a second, summed up by a label."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{where}[$__rate_interval]))"


def rates(title: str, metric: str, by: str, where: str = "", meaning: str = "") -> Panel:
    """Chart the events a second of each value of a label."""
    query = rate(metric, by, where)
    if by == "adapter":  # the base model's have none, and would have no legend
        query = f'label_replace({query}, "adapter", "base model", "adapter", "")'
    return Panel(title, PER_SECOND, ((query, f"{{{{{by}}}}}"),), meaning)


def quantile(fraction: float, metric: str) -> str:
    """Return the query of a quantile of a histogram."""
    return f"histogram_quantile({fraction}, {rate(f'{metric}_bucket', 'le')})"


def quantiles(title: str, metric: str, meaning: str = "") -> Panel:
    """Chart three quantiles of a histogram of seconds."""
    return Panel(
        title,
        SECONDS,
        tuple((quantile(fraction, metric), f"p{fraction * 100:g}") for fraction in (0.5, 0.9, 0.99)),
        meaning,
    )


def hit_rate(tier: str) -> str:
    """Return the query of the share of requests whose adapter was in a tier."""
    hits = rate("loraplex_adapter_requests_total", where=f'{{tier="{tier}",result="hit"}}')
    return f"{hits} / " + rate("loraplex_adapter_requests_total", where=f'{{tier="{tier}"}}')


CLUSTER = Dashboard(
    "loraplex-cluster",
    "Loraplex: cluster",
    (
        (
            "Requests",
            (
                rates("Calls that ended, by status", "loraplex_requests_total", "code"),
                rates(
                    "Errors, by reason",
                    "loraplex_request_errors_total",
                    "reason",
                    meaning="Each reason has a line in docs/reference/errors.md.",
                ),
                Panel(
                    "Tokens",
                    PER_SECOND,
                    (
                        (rate("loraplex_generation_tokens_total"), "generated"),
                        (rate("loraplex_prompt_tokens_total"), "prompt"),
                        (rate("loraplex_prompt_tokens_cached_total"), "of these cached"),
                    ),
                ),
                quantiles("Time to first token", "loraplex_time_to_first_token_seconds"),
                quantiles("Time between messages of an answer", "loraplex_inter_token_latency_seconds"),
                quantiles("Time in the queue", "loraplex_request_queue_time_seconds"),
            ),
        ),
        (
            "HTTP",
            (
                rates("HTTP requests, by status", "loraplex_http_requests_total", "status"),
                quantiles("Time of an HTTP request", "loraplex_http_request_seconds", "To the end of its answer."),
                Panel(
                    "HTTP connections",
                    COUNT,
                    (
                        ("sum(loraplex_http_connections)", "open"),
                        ("sum(loraplex_http_requests_open)", "requests that run"),
                    ),
                ),
            ),
        ),
        (
            "Queue and workers",
            (
                Panel(
                    "Jobs that wait, by model",
                    COUNT,
                    (("max by (model) (loraplex_queue_jobs_waiting)", "{{model}}"),),
                ),
                Panel(
                    "Workers, by phase",
                    COUNT,
                    (("max by (model, phase) (loraplex_workers)", "{{model}} {{phase}}"),),
                ),
                Panel(
                    "Rows",
                    COUNT,
                    (
                        ("sum(loraplex_num_requests_running)", "running"),
                        ("sum(loraplex_num_requests_waiting)", "waiting in engines"),
                        ("sum(loraplex_num_requests_limit)", "limit"),
                    ),
                    "Sequences in the batches of all workers.",
                ),
                Panel("KV blocks in use", SHARE, (("loraplex_kv_cache_usage_perc", "{{instance}}"),)),
                Panel(
                    "Prefix cache: share of prompt tokens found",
                    SHARE,
                    (
                        (
                            f"{rate('loraplex_prefix_cache_hits_total')} / "
                            f"{rate('loraplex_prefix_cache_queries_total')}",
                            "found",
                        ),
                    ),
                ),
                quantiles("Time of a step", "loraplex_engine_step_seconds"),
            ),
        ),
        (
            "Faults",
            (
                rates("Attempts after the first, by cause", "loraplex_redispatches_total", "cause"),
                Panel(
                    "Losses",
                    PER_SECOND,
                    (
                        (rate("loraplex_workers_lost_total"), "workers lost"),
                        (rate("loraplex_engines_lost_total"), "engines lost"),
                        (rate("loraplex_jobs_poisoned_total"), "jobs that killed engines"),
                    ),
                ),
                rates("Preemptions", "loraplex_num_preemptions_total", "instance"),
                Panel(
                    "Relay",
                    COUNT,
                    (
                        ("sum(loraplex_relay_links)", "links"),
                        ("sum(loraplex_relay_workers_unlinked)", "workers without a link"),
                    ),
                ),
            ),
        ),
    ),
)
TENANT = Dashboard(
    "loraplex-tenant",
    "Loraplex: tenant",
    (
        (
            "$tenant",
            (
                rates(
                    "Answered requests, by adapter", "loraplex_tenant_requests_total", "adapter", '{tenant=~"$tenant"}'
                ),
                rates(
                    "Requests that failed, by status",
                    "loraplex_tenant_request_failures_total",
                    "code",
                    '{tenant=~"$tenant"}',
                ),
                rates(
                    "Tokens of answers, by adapter",
                    "loraplex_tenant_generation_tokens_total",
                    "adapter",
                    '{tenant=~"$tenant"}',
                ),
                rates(
                    "Tokens of prompts, by adapter",
                    "loraplex_tenant_prompt_tokens_total",
                    "adapter",
                    '{tenant=~"$tenant"}',
                ),
                Panel(
                    "Mean time to first token",
                    SECONDS,
                    (
                        (
                            rate("loraplex_tenant_time_to_first_token_seconds_total", where='{tenant=~"$tenant"}')
                            + " / "
                            + rate("loraplex_tenant_requests_total", where='{tenant=~"$tenant"}'),
                            "mean",
                        ),
                    ),
                ),
                rates(
                    "Refusals by the plan, by limit", "loraplex_quota_refusals_total", "limit", '{tenant=~"$tenant"}'
                ),
            ),
        ),
    ),
    variable="tenant",
    metric="loraplex_tenant_requests_total",
)
ADAPTER = Dashboard(
    "loraplex-adapter",
    "Loraplex: adapters",
    (
        (
            "$adapter",
            (
                rates(
                    "Answered requests, by tenant", "loraplex_tenant_requests_total", "tenant", '{adapter=~"$adapter"}'
                ),
                rates(
                    "Tokens of answers", "loraplex_tenant_generation_tokens_total", "adapter", '{adapter=~"$adapter"}'
                ),
            ),
        ),
        (
            "Cache of adapters",
            (
                Panel(
                    "Requests whose adapter was there",
                    SHARE,
                    ((hit_rate("device"), "in a slot"), (hit_rate("disk"), "on the disk")),
                ),
                Panel(
                    "Slots",
                    COUNT,
                    (("sum by (state) (loraplex_adapter_slots)", "{{state}}"),),
                ),
                Panel(
                    "Loads, evictions, downloads",
                    PER_SECOND,
                    (
                        (rate("loraplex_adapter_loads_total"), "loads into a slot"),
                        (rate("loraplex_adapter_swaps_total"), "evictions from a slot"),
                        (rate("loraplex_adapter_fetches_total", "result"), "downloads: {{result}}"),
                    ),
                ),
                Panel("Bytes, by tier", BYTES, (("sum by (tier) (loraplex_adapter_bytes)", "{{tier}}"),)),
                quantiles("Wait for the disk", "loraplex_request_adapter_fetch_time_seconds"),
                quantiles("Wait for a slot", "loraplex_request_adapter_load_time_seconds"),
            ),
        ),
    ),
    variable="adapter",
    metric="loraplex_tenant_requests_total",
)
DASHBOARDS = (CLUSTER, TENANT, ADAPTER)
