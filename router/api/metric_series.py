"""The series of a router's metrics by their labels: finding a series takes longer than counting in it."""

from __future__ import annotations

from router.metrics import RouterMetrics
from router.request import FinishReason


class ModelSeries:
    """The series of one model. `success` has one for each reason of an answer's end."""

    def __init__(self, metrics: RouterMetrics, model: str) -> None:
        self.success = {reason.value: metrics.success.labels(model, reason.value) for reason in FinishReason}
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.generation_tokens = metrics.generation_tokens.labels(model)
        self.ttft = metrics.ttft.labels(model)
        self.itl = metrics.itl.labels(model)
        self.tpot = metrics.tpot.labels(model)
        self.e2e = metrics.e2e.labels(model)
        self.queue_time = metrics.queue_time.labels(model)
        self.prompt_length = metrics.prompt_length.labels(model)
        self.answer_length = metrics.answer_length.labels(model)


class TenantSeries:
    """The series of one tenant's answers by one adapter."""

    def __init__(self, metrics: RouterMetrics, tenant: str, adapter: str) -> None:
        self.requests = metrics.tenant_requests.labels(tenant, adapter)
        self.prompt_tokens = metrics.tenant_prompt_tokens.labels(tenant, adapter)
        self.generation_tokens = metrics.tenant_generation_tokens.labels(tenant, adapter)
        self.ttft = metrics.tenant_ttft.labels(tenant, adapter)
