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


@dataclass(frozen=True)
class AdapterTree:
    """The adapters below a directory by tenant and name, and a line for each entry that is not an adapter."""

    adapters: tuple[AdapterDirectory, ...] = ()
    faults: tuple[str, ...] = ()


def find_adapters(root: Path) -> AdapterTree:
    """Look for adapters below `root`. Raises CommandError where it has none that can be uploaded."""
    if not root.is_dir():
        raise CommandError(f"--adapters: {root} {'is not a directory' if root.exists() else 'does not exist'}")
    if (root / CONFIG_FILE).exists():
        raise CommandError(f"--adapters: {root} is an adapter itself; give its parent directory")
    found: list[AdapterDirectory] = []
    faults: list[str] = []

    def take(tenant: str, directory: Path) -> None:
        try:
            found.append(_checked(tenant, directory))
        except CommandError as error:
            faults.append(str(error))

    for child in _directories(root, faults):
        if (child / CONFIG_FILE).exists():
            take(SHARED, child)
            continue
        below = _directories(child, faults)
        for grandchild in below:
            take(child.name, grandchild)
        if not below:
            faults.append(f"--adapters: {child} is not an adapter, and holds none: it has no {CONFIG_FILE}")
    if not found:
        none = f"--adapters: {root} holds no adapters: no NAME/{CONFIG_FILE}, no TENANT/NAME/{CONFIG_FILE}"
        raise CommandError("; ".join(faults) or none)
    return AdapterTree(tuple(sorted(found, key=lambda adapter: (adapter.tenant, adapter.name))), tuple(faults))


def _directories(parent: Path, faults: list[str]) -> list[Path]:
    """Return the directories directly below `parent`, by name; links become faults."""
    found = []
    for path in sorted(path for path in parent.iterdir() if not path.name.startswith(".")):
        try:
            _check_no_link(path)
        except CommandError as error:
            faults.append(str(error))
            continue
        if path.is_dir():
            found.append(path)
    return found


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
