"""Settings of a process: a frozen dataclass, read once from flags and environment; flags win.

A field `relay_port` of the router is `--relay-port` and LORAPLEX_ROUTER_RELAY_PORT. A field without a default must be
given. An unknown flag, an unknown variable of the process's prefix or a bad value stops start-up with one clear line.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from loraplex.runtime.interpreter import StartError

T = TypeVar("T")


class SettingsError(StartError):
    """A setting that is missing, unknown or unreadable; the message is one line that names it."""


# The variable that several processes of one host share.
REDIS_URL_VARIABLE = "LORAPLEX_REDIS_URL"
REDIS_URL_HELP = f"Redis or Valkey server, such as redis://127.0.0.1:6379; also {REDIS_URL_VARIABLE}"


def setting(
    help_text: str,
    default: Any = dataclasses.MISSING,
    *,
    variable: str = "",
    least: float | None = None,
    above: float | None = None,
) -> Any:
    """Make a dataclass field with its help text, and a variable that several processes share.

    `least` and `above` are what a number is at least, and more than (see `check_bounds`).
    """
    metadata = {"help": help_text, "variable": variable, "least": least, "above": above}
    return dataclasses.field(default=default, metadata=metadata)


def check_bounds(settings: Any) -> None:
    """Raise ValueError for a number out of its bounds; settings call it in `__post_init__`."""
    for field in dataclasses.fields(settings):
        value, least, above = getattr(settings, field.name), field.metadata["least"], field.metadata["above"]
        if least is not None and not value >= least:
            raise ValueError(f"{_flag(field.name)} {value}: at least {least}")
        if above is not None and not value > above:
            raise ValueError(f"{_flag(field.name)} {value}: more than {above}")


def read_settings(
    cls: type[T], process: str, argv: Sequence[str], environ: Mapping[str, str], *, command: str = ""
) -> T:
    """Read an instance of `cls` for `process`, such as `router`, which `command` runs: `loraplex PROCESS` if empty.

    Raises SettingsError; exits 0 on --help.
    """
    prefix = f"LORAPLEX_{process.upper().replace('-', '_')}_"
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # a dataclass, by contract
    command = command or f"loraplex {process.removeprefix('adapter-')}"
    flags = vars(_parser(cls, command, prefix, fields, hints).parse_args(argv))
    variables = {prefix + name.upper(): name for name in fields}
    unknown = sorted(key for key in environ if key.startswith(prefix) and key not in variables)
    if unknown:
        raise SettingsError(f"unknown environment variable {unknown[0]}; --help lists the known ones")
    shared = {name: field.metadata["variable"] for name, field in fields.items() if field.metadata["variable"]}
    values = {name: (environ[key], key) for name, key in shared.items() if key in environ}
    values |= {name: (environ[key], key) for key, name in variables.items() if key in environ}
    values |= {name: (text, _flag(name)) for name, text in flags.items() if text is not None}
    missing = [name for name, field in fields.items() if name not in values and field.default is dataclasses.MISSING]
    if missing:
        raise SettingsError(f"missing setting: give {_flag(missing[0])} or {prefix}{missing[0].upper()}")
    try:
        return cls(**{name: _convert(hints[name], text, source) for name, (text, source) in values.items()})
    except ValueError as error:  # a check of the dataclass's own
        raise SettingsError(str(error)) from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise SettingsError(message)


def _parser(cls: type[Any], command: str, prefix: str, fields: Mapping[str, Any], hints: Mapping[str, Any]) -> _Parser:
    parser = _Parser(
        prog=command,
        description=(cls.__doc__ or "").strip(),
        epilog=f"Each flag is also an environment variable: {prefix} and its name in upper case. "
        "A setting without a default is off or empty.",
        allow_abbrev=False,
    )
    for name, field in fields.items():
        default = "" if field.default in (None, "") else f" (default: {field.default})"
        default = " (required)" if field.default is dataclasses.MISSING else default
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if hints[name] is bool else {}
        # argparse formats the text.
        text = (field.metadata["help"] + default).replace("%", "%%")
        parser.add_argument(_flag(name), dest=name, help=text, metavar=name.upper(), **switch)
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _convert(hint: Any, text: str, source: str) -> Any:
    if get_origin(hint) in {Union, types.UnionType}:
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    if hint is bool:
        if text.lower() not in {"true", "false", "1", "0", "yes", "no"}:
            raise SettingsError(f"{source}: {text!r} is not true or false")
        return text.lower() in {"true", "1", "yes"}
    try:
        return {int: int, float: float, str: str, Path: Path}[hint](text)
    except ValueError as error:
        raise SettingsError(f"{source}: {text!r} is not {'a whole number' if hint is int else 'a number'}") from error


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
