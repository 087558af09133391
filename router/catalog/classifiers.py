"""The tasks that a base model and an adapter serve, and the labels of their classifiers."""

from __future__ import annotations

from dataclasses import dataclass

from broker.messages import AdapterRef
from router.catalog.store_client import Manifest, StoreClient
from router.encode_request import EncodeRequest
from rpc.errors import Mismatch

# Reason of the error of a request whose task its base model or adapter does not serve.
WRONG_TASK = "WRONG_TASK"


@dataclass(frozen=True, slots=True)
class Classifier:
    """A classifier's labels in the order of its logits, and transformers' name of what it solves."""

    labels: tuple[str, ...]
    problem_type: str = ""


class Classifiers:
    """Finds the classifiers of one router's requests."""

    def __init__(self, store: StoreClient) -> None:
        self._store = store

    async def check_task(self, request: EncodeRequest, manifest: Manifest, adapter: AdapterRef | None) -> Classifier:
        """Return the classifier that a request asks for, one without labels for an embedding.

        Raises Mismatch where base model and adapter do not serve the task.
        """
        if request.task not in manifest.tasks:
            raise Mismatch(manifest.name, "", reason=WRONG_TASK)
        return Classifier(manifest.labels if request.task == "classify" else ())


def check_generates(manifest: Manifest) -> None:
    """Raise Mismatch where a base model generates nothing."""
    if "generate" not in manifest.tasks:
        raise Mismatch(manifest.name, "is an encoder and generates nothing; call Embed or Classify", reason=WRONG_TASK)
