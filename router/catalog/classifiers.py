"""The tasks that a base model and an adapter serve, and the labels of their classifiers."""

from __future__ import annotations

from dataclasses import dataclass

from broker.messages import AdapterRef
from router.catalog.adapter_settings import AdapterConfigs
from router.catalog.manifest import Manifest
from router.catalog.store_client import StoreClient
from router.encode_request import EncodeRequest
from rpc.errors import Mismatch

# Reason of the error of a request whose task its base model and adapter do not serve.
WRONG_TASK = "WRONG_TASK"


@dataclass(frozen=True, slots=True)
class Classifier:
    """A classifier's labels in the order of its logits, and transformers' name of what it solves; empty: not known."""

    labels: tuple[str, ...] = ()
    problem_type: str = ""

    def labels_of(self, count: int) -> tuple[str, ...]:
        """Return the names of `count` logits; LABEL_0 and so on where neither adapter nor base names them."""
        return self.labels or tuple(f"LABEL_{index}" for index in range(count))


class Classifiers:
    """Finds the classifiers of one router's requests."""

    def __init__(self, store: StoreClient) -> None:
        self.configs = AdapterConfigs(store)

    async def check_task(self, request: EncodeRequest, manifest: Manifest, adapter: AdapterRef | None) -> Classifier:
        """Return the classifier that a request asks for, one without labels for an embedding.

        Raises Mismatch where base model and adapter do not serve the task, NotFound or Unavailable.
        """
        if request.task == "embed":
            if "embed" not in manifest.tasks:
                message = "was registered by a version without vectors; register it again (loraplex models push)"
                raise Mismatch(manifest.name, message, reason=WRONG_TASK)
            return Classifier()
        settings = await self.configs.of(request.tenant, adapter)
        if settings.has_head:
            return Classifier(settings.labels)
        if "classify" not in manifest.tasks:
            message = f"{manifest.name} has no classification head; name an adapter that brings one (peft's SEQ_CLS)"
            raise Mismatch(adapter.revision if adapter else manifest.name, message, reason=WRONG_TASK)
        return Classifier(manifest.labels, manifest.problem_type)


def check_generates(manifest: Manifest) -> None:
    """Raise Mismatch where a base model generates nothing."""
    if "generate" not in manifest.tasks:
        raise Mismatch(manifest.name, "is an encoder and generates nothing; call Embed or Classify", reason=WRONG_TASK)
