"""Seals of a router, keys of its resume tokens, grants of pins: all made of its certificate and the job keys."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from redis.asyncio import Redis

from broker.connection import REDIS_DOWN
from broker.resume_keys import StoredResumeKeys
from router.catalog.models import Models
from router.generation.resume_keys import DerivedKeys, GivenKeys, SharedKeys
from router.settings import Settings
from rpc.errors import PermissionDenied
from rpc.identity.guard import Refused
from rpc.identity.principal import Role
from rpc.identity.tls import TlsFiles

if TYPE_CHECKING:
    from broker.seals import Seals

log = logging.getLogger(__name__)

# Interval in seconds between looks for pins whose grants end soon.
PINS_S = 60.0


def seals_of(tls: TlsFiles | None, job_key: str) -> Seals | None:
    """Return the seals of a router; None without credentials. Raises ValueError where the files cannot be used."""
    if tls is None:
        return None
    from broker.job_keys import JobKeys
    from broker.seals import Seals
    from rpc.identity.signatures import Signer, Verifier

    return Seals(JobKeys(Path(job_key)), Verifier(tls, Role.ROUTER), Signer(tls, Role.ROUTER))


def report_to(seals: Seals | None, refused: Refused) -> None:
    """Report what is not opened as the guard reports callers."""
    if seals is not None:
        seals.on_refused = lambda kind, error: refused(
            f"redis/{kind}", None, PermissionDenied(str(error), error.reason), "redis:"
        )


def resume_keys_of(settings: Settings, redis: Redis, seals: Seals | None) -> GivenKeys:
    """Return the keys of resume tokens: the given ones, derived ones, or without credentials those in Redis."""
    if settings.resume_key:
        return GivenKeys(settings.resume_key, settings.former_keys)
    if seals is not None:
        return DerivedKeys(lambda: seals.keys.derived(b"resume tokens"), settings.former_keys)
    return SharedKeys(StoredResumeKeys(redis), settings.former_keys)


async def renew_pins(models: Models) -> None:
    """Give pinned adapters new grants before theirs end; never returns."""
    while True:
        await asyncio.sleep(PINS_S)
        for model in models.served:
            try:
                await model.queue.pins.renew_grants()
            except REDIS_DOWN as error:
                log.warning("the grants of pinned adapters are not renewed: %s", error)
