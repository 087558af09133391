"""Settles reservations whose calls have ended, in their order, again and again while Redis does not answer."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from broker.connection import REDIS_DOWN
from broker.ledger import BehindError, Ledger
from broker.ledger_records import Reservation
from router.quotas.accounts import Accounts
from router.quotas.grant import End
from router.quotas.usage import UsageLog

log = logging.getLogger(__name__)

# Maximum reservations that are settled at once.
SETTLED_AT_ONCE = 64
# Interval in seconds between tries to settle while Redis does not answer.
RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class _Ended:
    account: str
    reservation: Reservation
    end: End
    known: asyncio.Future[None]


class Settling:
    """The reservations of one router that have ended and that the ledger does not know as such yet."""

    def __init__(self, ledger: Ledger, accounts: Accounts, usage: UsageLog | None, retry_s: float = RETRY_S) -> None:
        self._ledger = ledger
        self._accounts = accounts
        self._usage = usage
        self._retry_s = retry_s
        self._ended: deque[_Ended] = deque()
        self._settling: asyncio.Task[None] | None = None

    def end(self, account: str, reservation: Reservation, end: End) -> asyncio.Future[None]:
        """End a reservation in the background; the answer is done once the ledger knows."""
        loop = asyncio.get_running_loop()
        ended = _Ended(account, reservation, end, loop.create_future())
        self._ended.append(ended)
        if self._settling is None:
            self._settling = loop.create_task(self._settle_ended())
        return ended.known

    async def drain(self, timeout_s: float) -> None:
        """Settle what has ended, up to a timeout; what is not settled by then expires in the ledger."""
        if (settling := self._settling) is not None:
            await asyncio.wait({settling}, timeout=timeout_s)
            settling.cancel()

    async def _settle_ended(self) -> None:
        try:
            while self._ended:
                some = [self._ended.popleft() for _ in range(min(SETTLED_AT_ONCE, len(self._ended)))]
                await asyncio.gather(*map(self._settle, some))
                if left := [one for one in some if not one.known.done()]:
                    self._ended.extendleft(reversed(left))
                    await asyncio.sleep(self._retry_s)
        finally:
            self._settling = None

    async def _settle(self, ended: _Ended) -> None:
        """Tell the ledger of an end; `known` is done afterwards unless it is to be told again."""
        account, reservation = self._accounts.find(ended.account), ended.reservation
        try:
            copy, charge = await self._ledger.settle(ended.account, reservation, ended.end.value, account.copy)
            account.note(copy)
            if charge is not None and self._usage is not None:
                self._usage.add(ended.account, charge)
        except BehindError:
            await self._accounts.look(ended.account, account)
            return
        except REDIS_DOWN:
            return
        except Exception:
            log.exception("settling reservation %s failed", reservation.id)
        if not ended.known.done():
            ended.known.set_result(None)
