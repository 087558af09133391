"""The Redis contract between routers and workers, owned by neither side."""

import sys
from importlib import import_module

# redis-py imports OpenTelemetry's metrics for metrics of its own, which nobody turns on and which take a seventh of a
# process's start. Where they cannot be imported it goes on without.
_UNUSED = "opentelemetry.sdk.metrics"
if _UNUSED not in sys.modules:
    sys.modules[_UNUSED] = None  # type: ignore[assignment] # typeshed knows no missing module
    import_module("redis.asyncio")
    del sys.modules[_UNUSED]
