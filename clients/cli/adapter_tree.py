"""The directory of `loraplex up --adapters`: TENANT/NAME/ for a tenant's adapters, NAME/ for shared ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import ArtifactError
from artifacts.names import SHARED, parse_adapter_name
from artifacts.revision import CONFIG_FILE, WEIGHTS_FILE
from clients.cli.terminal import CommandError


@dataclass(frozen=True)
class AdapterDirectory:
    """A peft adapter on disk, and the tenant that will own it."""

    tenant: str
    name: str
    directory: Path


def find_adapters(root: Path) -> tuple[AdapterDirectory, ...]:
    """Return the adapters below `root` by tenant and name. Raises CommandError unless it holds adapters only."""
    if not root.is_dir():
        raise CommandError(f"--adapters: {root} {'is not a directory' if root.exists() else 'does not exist'}")
    if (root / CONFIG_FILE).exists():
        raise CommandError(f"--adapters: {root} is an adapter itself; give its parent directory")
    found: list[AdapterDirectory] = []
    for child in _directories(root):
        if (child / CONFIG_FILE).exists():
            found.append(_checked(SHARED, child))
            continue
        adapters = [_checked(child.name, grandchild) for grandchild in _directories(child)]
        if not adapters:
            raise CommandError(f"--adapters: {child} is not an adapter, and holds none: it has no {CONFIG_FILE}")
        found += adapters
    if not found:
        raise CommandError(f"--adapters: {root} holds no adapters: no NAME/{CONFIG_FILE}, no TENANT/NAME/{CONFIG_FILE}")
    return tuple(sorted(found, key=lambda adapter: (adapter.tenant, adapter.name)))


def _directories(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))


def _checked(tenant: str, directory: Path) -> AdapterDirectory:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise CommandError(f"--adapters: {directory} is not an adapter: it has no {name}")
    try:
        parsed = parse_adapter_name(f"tenants/{tenant}/adapters/{directory.name}", tenant)
    except ArtifactError as error:
        raise CommandError(f"--adapters: {directory}: {error}") from error
    return AdapterDirectory(parsed.tenant, parsed.adapter, directory)
