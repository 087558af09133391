"""docs/reference/settings.md has every setting of every process; `python -m tests.test_settings_page` writes it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from loraplex.adapter_store.app import StoreSettings
from loraplex.batch_runner.settings import RunnerSettings
from loraplex.gateway.settings import GatewaySettings
from loraplex.operator.scaler.settings import ScalerSettings
from loraplex.operator.settings import OperatorSettings
from loraplex.router.settings import RouterSettings
from loraplex.worker.io.settings import WorkerSettings

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
PROCESSES: dict[str, type[Any]] = {
    "Router": RouterSettings,
    "Worker": WorkerSettings,
    "Adapter store": StoreSettings,
    "Gateway": GatewaySettings,
    "Runner": RunnerSettings,
    "Scaler": ScalerSettings,
    "Operator": OperatorSettings,
}
HEAD = """# Settings

Flags with their defaults, as `loraplex router --help` and so on print them; without a default a setting is off or
empty. A flag wins over its variable: `--relay-port` of the router is `LORAPLEX_ROUTER_RELAY_PORT`; the other prefixes
are `LORAPLEX_WORKER_`, `LORAPLEX_ADAPTER_STORE_`, `LORAPLEX_GATEWAY_`, `LORAPLEX_RUNNER_`, `LORAPLEX_SCALER_` and
`LORAPLEX_OPERATOR_`. `python -m tests.test_settings_page` writes this page.

## In several processes

"""


def texts(field: dataclasses.Field[Any]) -> tuple[str, str]:
    """Return a setting's flag with its default, or that it is required, and its meaning."""
    required = " (required)" if field.default is dataclasses.MISSING else ""
    default = "" if required or field.default in ("", None) or field.default is False else f" {field.default}"
    meaning = re.sub(r" \(docs/[\w/-]+\.md\)", "", field.metadata["help"])
    return f"`--{field.name.replace('_', '-')}{default}`{required}", meaning


def page() -> str:
    """Return the page: the settings that several processes have alike, and then those of each."""
    owners: dict[tuple[str, str], list[str]] = {}
    for name, process in PROCESSES.items():
        for field in dataclasses.fields(process):
            owners.setdefault(texts(field), []).append(name)
    parts = [HEAD]
    parts += [
        f"- {flag}, of {'all' if len(of) == len(PROCESSES) else ', '.join(of)}: {meaning}\n"
        for (flag, meaning), of in owners.items()
        if len(of) > 1
    ]
    for name in PROCESSES:
        parts.append(f"\n## {name}\n\n")
        parts += [f"- {flag}: {meaning}\n" for (flag, meaning), of in owners.items() if of == [name]]
    return "".join(parts)


def test_the_page_has_every_setting() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run .venv/bin/python -m tests.test_settings_page"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
