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
    found = sorted(path for path in parent.iterdir() if not path.name.startswith("."))
    for path in found:
        _check_no_link(path)
    return [path for path in found if path.is_dir()]


def _check_no_link(path: Path) -> None:
    """Raise CommandError for a symbolic link: who may write to the directory could upload any file with it."""
    if path.is_symlink():
        raise CommandError(f"--adapters: {path} is a symbolic link, and links are not followed; copy what it names")


def _checked(tenant: str, directory: Path) -> AdapterDirectory:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        _check_no_link(directory / name)
        if not (directory / name).is_file():
            raise CommandError(f"--adapters: {directory} is not an adapter: it has no {name}")
    try:
        parsed = parse_adapter_name(f"tenants/{tenant}/adapters/{directory.name}", tenant)
    except ArtifactError as error:
        raise CommandError(f"--adapters: {directory}: {error}") from error
    return AdapterDirectory(parsed.tenant, parsed.adapter, directory)
