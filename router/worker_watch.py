"""Looks at the workers for the dispatcher and for the relay's reach."""

from __future__ import annotations

from router.catalog.models import Models
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.reach import RelayReach


async def look_at_workers(models: Models, dispatcher: Dispatcher, reach: RelayReach) -> None:
    """Dispatch the jobs of lost workers again, and end those that no worker can claim."""
    living = await models.look_at_workers()
    if living is None:
        reach.forget()
        return
    dispatcher.update_live_workers(living)
    names = (model.manifest.name for model in models.served)
    for name in reach.look({name: models.serving(name) for name in names}):
        dispatcher.fail_waiting(name, reach.refusal)
