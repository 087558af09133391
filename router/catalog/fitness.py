"""Adapters on a quantized base that their certificates find them unfit for: refused or warned of, as the store says."""

from __future__ import annotations

import logging
from functools import lru_cache

from router.catalog.manifest import Manifest
from router.catalog.store_client import ResolvedAdapter
from rpc.errors import Mismatch

log = logging.getLogger(__name__)

# Maximum number of adapters whose warning is remembered, so that their next request does not log it again.
_WARNINGS_KEPT = 4096


def check_fitness(resolved: ResolvedAdapter, model: Manifest) -> None:
    """Raise Mismatch, or log a warning once, where a certificate for the model's quantization breaks a limit."""
    breach = resolved.breaches.get(model.quantization)
    if breach is None:
        return
    found = f"unfit for {model.name}, whose weights are {model.quantization}: {breach.text}"
    if not breach.refused:
        _warn_once(resolved.ref.revision, found)
        return
    raise Mismatch(
        resolved.ref.revision,
        f"{found}; use a base of more bits, or train the adapter on this base and certify it again",
        reason="ADAPTER_UNFIT",
    )


def forget_warnings() -> None:
    """Forget which adapters were warned of."""
    _warn_once.cache_clear()


@lru_cache(maxsize=_WARNINGS_KEPT)
def _warn_once(revision: str, found: str) -> None:
    log.warning("%s is %s", revision, found)
