"""Accounts of tenants, API keys and adapters: copies of those in Redis, by which routers fill one that lost its data.

Operators and auditors read them, and a tenant's administrator those of its tenant, keys and adapters.

The clock that numbers the windows is that of Redis. The store follows it: a window is taken however far it is ahead, as
refusing it would lose a quota for a wrong clock. A saved window that has not begun by the store's clock gives way to
any other, so that a clock that was ahead and is put right does not close an account for as long as it was ahead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from loraplex.adapter_store.convert import MAX_SIZE, check_key_id, list_page, refusals
from loraplex.adapter_store.database import Database
from loraplex.admin.v1 import accounts_pb2 as pb
from loraplex.admin.v1 import accounts_pb2_grpc
from loraplex.contracts.artifacts.names import check_tenant, parse_adapter_name
from loraplex.contracts.plans import windows_at
from loraplex.runtime.rpc.errors import InvalidField
from loraplex.runtime.rpc.interceptors import Context
from loraplex.runtime.rpc.principal import own_tenant

# The columns of an account's row, which are the fields of its message.
Row = dict[str, Any]

# The windows, and the counts that belong to each.
_COUNTS = {
    "minute": ("requests", "input_tokens", "output_tokens", "minute_cost"),
    "day": ("day_tokens", "day_cost"),
    "month": ("month_tokens", "month_cost"),
}
_NUMBERS = tuple(name for window, counts in _COUNTS.items() for name in (window, *counts))
_COLUMNS = ", ".join(("name", *_NUMBERS))
# Limit of every number: Lua in Redis counts in doubles, which have all integers below it.
_NUMBER_LIMIT = 2**53
# Slack in milliseconds before a window that has not begun counts as one of a wrong clock: clocks differ by seconds.
_AHEAD_MS = 60_000
# Time in milliseconds for which an account is kept after its windows: the clock of Redis may be behind.
_KEPT_MS = 86_400_000
# Interval in milliseconds between removals of accounts whose windows have passed.
_REMOVE_MS = 3_600_000


def _merge(window: str) -> str:
    """Return the assignments that merge a saved window with a new one, which `excluded` has."""
    newer = f"excluded.{window} > accounts.{window} OR accounts.{window} > :latest_{window}"
    merged = [f"{window} = CASE WHEN {newer} THEN excluded.{window} ELSE accounts.{window} END"]
    merged += [
        f"{count} = CASE WHEN excluded.{window} = accounts.{window} THEN max(excluded.{count}, accounts.{count}) "
        f"WHEN {newer} THEN excluded.{count} ELSE accounts.{count} END"
        for count in _COUNTS[window]
    ]
    return ", ".join(merged)


_SAVE = (
    f"INSERT INTO accounts ({_COLUMNS}) VALUES (:name, {', '.join(f':{name}' for name in _NUMBERS)}) "
    f"ON CONFLICT (name) DO UPDATE SET {', '.join(map(_merge, _COUNTS))}"
)
# An account whose windows have all passed has nothing that a quota counts.
_HAS_PASSED = "month < :month AND day < :day AND minute < :minute"
_OF_TENANT = (
    "name = :tenant OR name IN (SELECT 'keys/' || key_id FROM api_keys WHERE tenant = :tenant) "
    "OR substr(name, 1, length(:tenant) + 18) = 'tenants/' || :tenant || '/adapters/'"
)
_PAGE = (
    f"SELECT {_COLUMNS} FROM accounts WHERE name > :after AND NOT ({_HAS_PASSED}) "
    f"AND (:tenant = '' OR {_OF_TENANT}) ORDER BY name LIMIT :limit"
)
_REMOVE = f"DELETE FROM accounts WHERE {_HAS_PASSED}"


class StoredAccounts:
    """The saved accounts. Its calls block: make them in a thread."""

    def __init__(self, database: Database, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._database = database
        self._now_ns = now_ns
        self._remove_at_ms = 0

    def save(self, accounts: Iterable[Row]) -> None:
        """Merge accounts into the saved ones, all or none. Raises Exhausted on a full disk."""
        now_ms = self._now_ms()
        latest = {f"latest_{window}": number for window, number in windows_at(now_ms + _AHEAD_MS).items()}
        with self._database.merging() as rows:
            rows.executemany(_SAVE, [{**account, **latest} for account in sorted(accounts, key=itemgetter("name"))])
        if now_ms >= self._remove_at_ms:
            with self._database.transaction() as rows:
                rows.execute(_REMOVE, windows_at(now_ms - _KEPT_MS))
            self._remove_at_ms = now_ms + _REMOVE_MS

    def page(self, after: str, limit: int, *, tenant: str = "") -> list[Row]:
        """Return accounts in order of name, from the first after `after`, without those whose windows have passed.

        With a tenant, its own and those of its keys.
        """
        values = {"after": after, "limit": limit, "tenant": tenant, **windows_at(self._now_ms() - _KEPT_MS)}
        with self._database.reading() as rows:
            return [dict(row) for row in rows.execute(_PAGE, values)]

    def _now_ms(self) -> int:
        return self._now_ns() // 1_000_000


class AccountService(accounts_pb2_grpc.AccountServiceServicer):
    """Serves loraplex.admin.v1.AccountService.

    `note` is called in a thread before accounts are saved, with rows and the names of those whose budget is spent.
    """

    def __init__(self, accounts: StoredAccounts, note: Callable[[Sequence[Row], Collection[str]], None]) -> None:
        self._accounts, self._note = accounts, note
        self._saving = asyncio.Lock()
        # The accounts of all calls that wait for the save that runs, and the task that saves them after it.
        self._batch: list[Row] = []
        self._spent = set[str]()
        self._task: asyncio.Task[None] | None = None

    async def SaveAccounts(self, request: pb.SaveAccountsRequest, context: Context) -> pb.SaveAccountsResponse:
        """Merge accounts into the saved ones."""
        if len(request.accounts) > MAX_SIZE:
            raise InvalidField("accounts", f"{len(request.accounts)}; at most {MAX_SIZE}")

        def rows() -> list[Row]:
            return [_from_pb(f"accounts[{at}]", one) for at, one in enumerate(request.accounts)]

        read = await asyncio.to_thread(rows)
        # Two statements: one `+=` reads the batch before it awaits, and would bring back one that a save has taken.
        self._batch += [row for row in read if any(row[window] for window in _COUNTS)]
        self._spent |= {one.name for one in request.accounts if one.budget_spent}
        if self._task is None:
            self._task = asyncio.create_task(self._save())
        await asyncio.shield(self._task)
        return pb.SaveAccountsResponse()

    async def _save(self) -> None:
        async with self._saving:
            batch, spent, self._batch, self._spent, self._task = self._batch, self._spent, [], set(), None
            await asyncio.to_thread(self._note, batch, spent)
            await asyncio.to_thread(self._accounts.save, batch)

    async def ListAccounts(self, request: pb.ListAccountsRequest, context: Context) -> pb.ListAccountsResponse:
        """Return a page of the accounts that the caller sees, in order of name."""
        fetch = partial(self._accounts.page, tenant=own_tenant())
        accounts, token = await list_page(request, fetch, lambda row: pb.Account(**row), lambda row: str(row["name"]))
        return pb.ListAccountsResponse(accounts=accounts, next_page_token=token)


def _from_pb(field: str, account: pb.Account) -> Row:
    """Return an account's row. Raises InvalidField."""
    if account.name.startswith("keys/"):
        check_key_id(f"{field}.name", account.name.removeprefix("keys/"))
    else:
        with refusals(f"{field}.name"):
            parse_adapter_name(account.name, "") if "/" in account.name else check_tenant(account.name)
    row: Row = {"name": account.name}
    for number in _NUMBERS:
        value = getattr(account, number)
        if not 0 <= value < _NUMBER_LIMIT:
            raise InvalidField(f"{field}.{number}", f"{value}; 0 to {_NUMBER_LIMIT - 1}")
        row[number] = value
    return row
