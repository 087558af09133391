"""Packages that a flag needs and that need not be installed."""

from __future__ import annotations

from importlib.util import find_spec

# Name of the package on PyPI, and what installs it, by the module that is imported.
_PACKAGES = {
    "smg_grpc_proto": ("smg-grpc-proto", "pip install 'loraplex[smg]'"),
    "grpc_reflection": ("grpcio-reflection", "pip install grpcio-reflection"),
}


def is_installed(module: str) -> bool:
    """Tell whether a module can be imported."""
    return find_spec(module) is not None


def check_installed(flag: str, module: str) -> None:
    """Raise ValueError where a flag is given without the package that it needs."""
    if not is_installed(module):
        package, command = _PACKAGES[module]
        raise ValueError(f"{flag}: needs the package {package}: {command}")
