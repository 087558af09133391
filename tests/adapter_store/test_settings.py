from __future__ import annotations

import pytest

from loraplex.adapter_store.app import StoreSettings
from loraplex.runtime.rpc.settings import SettingsError, read_settings


def read(*argv: str, **environ: str) -> StoreSettings:
    return read_settings(StoreSettings, "adapter-store", ["--data", "data", *argv], environ)


def test_defaults_and_environment() -> None:
    settings = read(LORAPLEX_ADAPTER_STORE_PORT="0")
    assert (settings.host, settings.port, settings.max_adapter_bytes) == ("127.0.0.1", 0, 4 * 1024**3)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "[::1]"])
def test_loopback_needs_no_leave(host: str) -> None:
    assert read("--host", host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.168.1.5", "store.example", ""])
def test_beyond_loopback_needs_insecure_tenants(host: str) -> None:
    with pytest.raises(SettingsError, match="accept that with --insecure-tenants"):
        read("--host", host)
    assert read("--host", host, "--insecure-tenants").host == host
