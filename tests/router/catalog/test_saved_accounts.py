"""Accounts that a router saves at a real store and reads from it, and a store of a version without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.admin.v1.accounts_pb2 import Account
from loraplex.router.catalog.store_client import StoreClient
from loraplex.runtime.rpc.errors import InvalidField, Unavailable

MONTH = 12 * 9999


async def saved(client: StoreClient) -> list[Account]:
    return [account async for page in client.account_pages() for account in page]


async def test_accounts_are_saved_and_read_in_batches(tmp_path: Path) -> None:
    store = Store(StoreSettings(data=tmp_path / "data", port=0))
    await store.start()
    client = StoreClient(f"127.0.0.1:{store.port}")
    try:
        assert await saved(client) == []
        accounts = [Account(name=f"tenant{at:04}", month=MONTH, month_tokens=at) for at in range(2001)]
        await client.save_accounts(accounts)
        await client.save_accounts([])
        assert await saved(client) == accounts
        with pytest.raises(InvalidField, match=r"accounts\[0\]\.name"):
            await client.save_accounts([Account(name="no tenant")])
    finally:
        await store.stop(drain_s=0)
    with pytest.raises(Unavailable):
        await client.save_accounts(accounts)
    with pytest.raises(Unavailable):
        await saved(client)
    await client.close()
