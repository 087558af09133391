"""The Redis contract between routers and workers, owned by neither side."""

import sys
from importlib import import_module

# redis-py imports OpenTelemetry for metrics of its own, which nobody turns on and which take a fifth of a process's
# start. Where they cannot be imported it goes on without.
_unused = [name for name in ("opentelemetry.metrics", "opentelemetry.sdk.metrics") if name not in sys.modules]
sys.modules.update(dict.fromkeys(_unused))  # type: ignore[arg-type] # typeshed knows no missing module
import_module("redis.asyncio")
for _name in _unused:
    del sys.modules[_name]
