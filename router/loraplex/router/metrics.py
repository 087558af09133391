"""The metrics of a router. docs/reference/metrics.md lists and explains them; a test compares the two."""

from __future__ import annotations

from loraplex.runtime.telemetry.metrics import LONG_S, SHORT_S, TOKENS, BoundedNames, Meters
from loraplex.runtime.tenancy.audit_log import AuditCounts

# Bounds in seconds that an objective of the time to the first token may have: a few, as each tenant has all of them.
OBJECTIVES_S = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# Causes of an attempt after the first.
LOST, RETURNED, UNCLAIMED, MOVED = "lost", "returned", "unclaimed", "moved"


class RouterMetrics(Meters):
    """The metrics of one router. Times are of the monotonic clock of this process, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        model = ("model",)
        self.requests = self.counter(
            "requests", "Generate, Resume, Score, Embed and Classify calls that ended, by gRPC status.", ("code",)
        )
        self.errors = self.counter("request_errors", "Of these, those with an error, by its reason.", ("reason",))
        self.success = self.counter("request_success", "Answers that ended well.", ("model", "finished_reason"))
        self.prompt_tokens = self.counter("prompt_tokens", "Prompt tokens of answered requests.", model)
        self.cached_tokens = self.counter("prompt_tokens_cached", "Of these, found in a prefix cache.", model)
        self.generation_tokens = self.counter("generation_tokens", "Tokens delivered to clients.", model)
        self.ttft = self.histogram("time_to_first_token_seconds", "From the call to its first tokens.", LONG_S, model)
        self.itl = self.histogram("inter_token_latency_seconds", "Between an answer's messages.", SHORT_S, model)
        self.tpot = self.histogram(
            "request_time_per_output_token_seconds", "A request's mean time per token after the first.", SHORT_S, model
        )
        self.e2e = self.histogram("e2e_request_latency_seconds", "From the call to its end.", LONG_S, model)
        self.queue_time = self.histogram("request_queue_time_seconds", "Until a worker claimed it.", LONG_S, model)
        self.prompt_length = self.histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS, model)
        self.answer_length = self.histogram(
            "request_generation_tokens", "Tokens of a request's answers.", TOKENS, model
        )
        self._add_tenant_metrics()
        self.evicted_keys = self.counter("redis_evicted_keys", "Keys that Redis evicted, of whatever program.")
        self.redispatches = self.counter("redispatches", "Attempts after the first, by what made them.", ("cause",))
        self.cell_jobs = self.counter("cell_jobs", "Attempts that this router put into a cell.", ("model", "cell"))
        self.workers_lost = self.counter("workers_lost", "Worker incarnations that were lost with jobs of ours.")
        self.poisoned = self.counter("jobs_poisoned", "Jobs that were ended because they killed engines.")
        self.displaced = self.counter("jobs_displaced", "Waiting jobs that a tenant with a lower use displaced.")
        self.unservable = self.counter(
            "jobs_unservable", "Jobs that were ended because no live worker could take them.", ("reason",)
        )
        self.quarantined = self.counter("jobs_quarantined", "Jobs that were refused because their like killed engines.")
        self.enqueue_time = self.histogram("enqueue_seconds", "To put a job into the queue.", SHORT_S)
        self._add_kind_metrics()
        self._add_quota_metrics()
        self.frames = self.counter("relay_frames_received", "Frames that came from workers.")
        self.messages = self.counter("relay_messages_received", "Messages that these came in.")
        self.rewinds = self.counter("relay_rewinds", "Frames with a gap before them, which were asked for again.")
        self.stale = self.counter(
            "relay_frames_refused", "Frames of an attempt, or from a worker, that is not current."
        )
        self.calls = self.rpc_calls()
        self.refused = self.refused_callers()
        self.audit = AuditCounts(self)
        # Refreshed by loraplex.router.app.
        self.open_requests = self.gauge("requests_open", "This router's requests, queued or running.", ("state",))
        self.waiting = self.gauge("queue_jobs_waiting", "Jobs in a model's queue, of all routers.", model)
        self.workers = self.gauge(
            "workers",
            "Live workers, by phase, and whether they serve the live revision.",
            ("model", "phase", "revision"),
        )
        self.kv_usage = self.gauge("cluster_kv_cache_usage_perc", "Share of all workers' KV blocks in use.", model)
        # Labelled as inference gateways expect; the value is the wall clock's time of the refresh in seconds.
        self.lora_requests = self.gauge(
            "lora_requests_info",
            "Adapters of this router's requests.",
            ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        self.links = self.gauge("relay_links", "Workers whose relay stream is open.")
        self.unlinked_workers = self.gauge("relay_workers_unlinked", "Live workers that do not reach this router.")
        self.unreachable = self.counter("relay_unreachable", "Requests that no worker could claim for want of a link.")
        for cause in (LOST, RETURNED, UNCLAIMED, MOVED):
            self.redispatches.labels(cause)
        self.tenants, self.adapters = BoundedNames(), BoundedNames()

    def _add_tenant_metrics(self) -> None:
        of = ("tenant", "adapter")
        self.tenant_requests = self.counter("tenant_requests", "Requests that ended well.", of)
        self.tenant_failures = self.counter(
            "tenant_request_failures", "Requests that did not.", ("tenant", "code", "reason")
        )
        self.tenant_prompt_tokens = self.counter("tenant_prompt_tokens", "Prompt tokens of these requests.", of)
        self.tenant_generation_tokens = self.counter("tenant_generation_tokens", "Tokens delivered to them.", of)
        self.tenant_drafts = self.counter("tenant_spec_decode_num_drafts", "Steps that checked a draft for them.", of)
        self.tenant_draft_tokens = self.counter("tenant_spec_decode_num_draft_tokens", "Tokens drafted for them.", of)
        self.tenant_accepted_tokens = self.counter(
            "tenant_spec_decode_num_accepted_tokens", "Of these, tokens that the model chose too.", of
        )
        self.tenant_ttft = self.counter("tenant_time_to_first_token_seconds", "The sum of their times.", of)
        self.tenant_first_token = self.histogram(
            "tenant_first_token_seconds", "These times, for objectives.", OBJECTIVES_S, ("tenant",)
        )

    def _add_kind_metrics(self) -> None:
        self.texts = self.counter("texts_encoded", "Texts that were answered without tokens.", ("model", "task"))
        self.not_enforced = self.counter(
            "requests_not_enforced", "Answered chats with a tool whose schema was not enforced in full.", ("model",)
        )

    def _add_quota_metrics(self) -> None:
        self.quota_refusals = self.counter(
            "quota_refusals", "Calls that a limit of their tenant's plan refused.", ("tenant", "limit")
        )
        self.reserve_time = self.histogram("quota_reserve_seconds", "To reserve a call's tokens.", SHORT_S)
        self.reservations_expired = self.counter(
            "quota_reservations_expired", "Reservations that ended because no router renewed them."
        )
        self.ledger_refills = self.counter(
            "quota_ledger_refills", "Times that this router told a ledger that had lost data what it knows."
        )
        checks = ("of", "result")
        self.content_checks = self.counter("content_checks", "Checks of prompts and answers by the hook.", checks)
        self.content_check_time = self.histogram("content_check_seconds", "To ask the content hook.", SHORT_S)
        self.usage_events = self.counter(
            "usage_events", "Usage events that this router sent and wrote, and Redis forgot."
        )
        self.usage_sent = self.counter("usage_events_sent", "Usage events that the collector took.")
        self.usage_send_failures = self.counter("usage_send_failures", "Batches that the collector did not take.")
        self.keys_age = self.gauge("api_keys_age_seconds", "Time since the store last told the API keys.")
        self.usage_waiting = self.gauge("usage_events_waiting", "Usage events in Redis, while they do not go.")
