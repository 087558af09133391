"""docs/reference/settings.md has every setting of every process; `python -m tests.test_settings_page` writes it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from adapter_store.app import StoreSettings
from clients.gateway.settings import GatewaySettings
from clients.operator.settings import OperatorSettings
from clients.scaler.settings import ScalerSettings
from router.settings import Settings as RouterSettings
from worker.io.settings import Settings as WorkerSettings

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
PROCESSES: dict[str, type[Any]] = {
    "Router": RouterSettings,
    "Worker": WorkerSettings,
    "Adapter store": StoreSettings,
    "Gateway": GatewaySettings,
    "Scaler": ScalerSettings,
    "Operator": OperatorSettings,
}
HEAD = """# Settings

`python -m router`, `python -m worker`, `python -m adapter_store`, `loraplex gateway`, `loraplex scaler` and `loraplex
operator` take these flags; `--help` prints the same text. Every flag is also an environment variable: `--relay-port` of
the router is `LORAPLEX_ROUTER_RELAY_PORT`; the others begin with `LORAPLEX_WORKER_`, `LORAPLEX_ADAPTER_STORE_`,
`LORAPLEX_GATEWAY_`, `LORAPLEX_SCALER_` and `LORAPLEX_OPERATOR_`. A flag wins over its variable. An unknown flag or
variable, or a bad value, ends the start with one line.

`.venv/bin/python -m tests.test_settings_page` writes this page.
"""


def rows(process: type[Any]) -> dict[str, str]:
    """Return the table's row of each setting of a process."""
    return {field.name: row(field) for field in dataclasses.fields(process)}


def row(field: dataclasses.Field[Any]) -> str:
    """Return the row of a setting; one without a default is required."""
    default = (
        "required" if field.default is dataclasses.MISSING else "" if field.default in ("", None) else field.default
    )
    meaning = re.sub(r" \(docs/[\w/-]+\.md\)", "", field.metadata["help"]).replace("|", "\\|")
    return f"| `--{field.name.replace('_', '-')}` | {default} | {meaning} |"


def page() -> str:
    """Return the page: the settings of several processes, and then those of each."""
    owners: dict[str, list[str]] = {}
    for name, process in PROCESSES.items():
        for line in rows(process).values():
            owners.setdefault(line, []).append(name)
    shared = {line: names for line, names in owners.items() if len(names) > 1}
    tables = {", ".join(names): [line for line in shared if shared[line] == names] for names in shared.values()}
    tables |= {name: [line for line, names in owners.items() if names == [name]] for name in PROCESSES}
    head = "| flag | default | meaning |\n| --- | --- | --- |\n"
    return HEAD + "".join(f"\n## {name}\n\n{head}" + "\n".join(table) + "\n" for name, table in tables.items())


def test_the_page_has_every_setting() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run .venv/bin/python -m tests.test_settings_page"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
