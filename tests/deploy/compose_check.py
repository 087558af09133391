"""Checks that all names in compose.yaml and its Dockerfiles exist; one line for each problem.

The processes themselves list their flags and variables, so that no list here can become outdated.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

_PIN = re.compile(r"^([\w.-]+)==([^\s;]+)[^\n]*((?:\n +--hash=sha256:[0-9a-f]{64}[ \\]*)*)", re.MULTILINE)
_NAME = re.compile(r"[\w.-]+")
# The lock of what builds the project's own packages.
_BUILD = "build"
_OWN = frozenset({"loraplex", "loraplex-client"})
_INSTRUCTIONS = frozenset(
    {"FROM", "RUN", "CMD", "EXPOSE", "ENV", "ADD", "COPY", "ENTRYPOINT", "USER", "WORKDIR", "ARG", "LABEL"}
)


def lock_problems(name: str, root: Path, project: Mapping[str, Any]) -> Iterator[str]:
    """Return the problems of a lock, one line each: compared with pyproject.toml and constraints.txt."""
    path = root / name
    if not path.is_file():
        yield f"no lock {name}: run `make lock`"
        return
    pins = {_normal(pin[1]): pin for pin in _PIN.finditer(path.read_text())}
    for required in _requirements(path.stem, project):
        if required not in pins:
            yield f"{name}: {required} of pyproject.toml is missing: run `make lock`"
    for pin in _PIN.finditer((root / "constraints.txt").read_text()):
        locked = pins.get(_normal(pin[1]))
        if locked is not None and locked[2] != pin[2]:
            yield f"{name}: {locked[0].split()[0]}, but in constraints.txt {pin[1]} is {pin[2]}: run `make lock`"
    yield from (f"{name}: {one} has no hash: run `make lock`" for one, pin in pins.items() if not pin[3])


def _requirements(lock: str, project: Mapping[str, Any]) -> set[str]:
    """Return the names of what a lock is for: the build system's, or the project's with some extras."""
    listed = project["build-system"]["requires"]
    if lock != _BUILD:
        extras, names = project["project"]["optional-dependencies"], lock.split(",")
        listed = [*project["project"]["dependencies"]]
        for extra in names:  # an extra may include others, which are then read too
            names += [name for one in extras.get(extra, ()) for name in re.findall(r"^loraplex\[(.+)\]", one)]
            listed += [one for one in extras.get(extra, ()) if not one.startswith("loraplex[")]
    matches = (_NAME.match(one) for one in listed)
    return {_normal(match[0]) for match in matches if match} - _OWN


def _normal(name: str) -> str:
    """Return a package's name as the index compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Instruction:
    """An instruction with the number of its first line; `arguments` are its words without --flags."""

    line: int
    name: str
    text: str

    @property
    def flags(self) -> dict[str, str]:
        """Return the instruction's --key=value flags."""
        pairs = (word[2:].partition("=") for word in self.text.split() if word.startswith("--"))
        return {key: value for key, _, value in pairs}

    @property
    def arguments(self) -> list[str]:
        """Return the instruction's words without flags."""
        return [word for word in shlex.split(self.text) if not word.startswith("--")]


def read_instructions(text: str) -> Iterator[Instruction]:
    """Parse the instructions, with continued lines joined and comments dropped."""
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or joined):
            continue
        start = start or number
        joined += line.removesuffix("\\").strip() + " "
        if not line.endswith("\\"):
            name, _, rest = joined.strip().partition(" ")
            yield Instruction(start, name.upper(), rest.strip())
            joined, start = "", 0


def dockerfile_problems(path: Path, root: Path, arguments: Mapping[str, str]) -> Iterator[str]:
    """Return the file's problems in a build from `root` with these build arguments, one line each."""
    shown = path.relative_to(root)
    instructions = list(read_instructions(path.read_text()))
    if not instructions or instructions[0].name not in ("FROM", "ARG"):
        yield f"{shown}: does not begin with FROM"
    stages: list[str] = []
    known_arguments: set[str] = set()
    user = "root"
    for at in instructions:
        where = f"{shown}:{at.line}"
        if at.name not in _INSTRUCTIONS:
            yield f"{where}: unknown instruction {at.name}"
        elif at.name == "FROM":
            user = "root"
            yield from (f"{where}: {problem}" for problem in _from_problems(at, stages, arguments))
        elif at.name == "ARG":
            known_arguments.add(at.arguments[0].partition("=")[0])
        elif at.name == "USER":
            user = at.arguments[0]
        elif at.name in ("COPY", "ADD"):
            yield from (f"{where}: {problem}" for problem in _copy_problems(at, stages, root))
    if user.partition(":")[0] in ("root", "0"):
        yield f"{shown}: the last stage runs as root; give it a USER"
    yield from (
        f"{shown}: build argument {name} is not an ARG of it" for name in arguments if name not in known_arguments
    )
    yield from _install_problems(str(shown), instructions, root, arguments)


def _from_problems(instruction: Instruction, stages: list[str], arguments: Mapping[str, str]) -> Iterator[str]:
    words = instruction.arguments
    image = _expand(words[0], arguments)
    if image not in stages and not is_pinned(image):
        yield f"image {image} has no version"
    stages.append(words[2] if len(words) == 3 and words[1].upper() == "AS" else str(len(stages)))


def _copy_problems(instruction: Instruction, stages: list[str], root: Path) -> Iterator[str]:
    source_stage = instruction.flags.get("from")
    if source_stage is not None:
        if source_stage not in stages:
            yield f"no stage {source_stage}"
        return
    for source in instruction.arguments[:-1]:
        if not (root / source).exists():
            yield f"no file or directory {source}"


def _install_problems(
    shown: str, instructions: list[Instruction], root: Path, arguments: Mapping[str, str]
) -> Iterator[str]:
    """Check that a `pip wheel` has the sources, and that each lock of a `pip install` exists and is complete."""
    copied = {
        source for at in instructions if at.name == "COPY" for source in at.arguments[:-1] if "from" not in at.flags
    }
    project = tomllib.loads((root / "pyproject.toml").read_text())
    for at in (at for at in instructions if at.name == "RUN"):
        words, where = at.arguments, f"{shown}:{at.line}"
        if "pip wheel" in at.text:
            packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
            needed = {*(package.removesuffix("/loraplex") for package in packages), "pyproject.toml", "protos"}
            needed.add(project["project"]["readme"])
            yield from (f"{where}: builds without a copy of {name}" for name in sorted(needed - copied))
        for name in (_expand(words[place + 1], arguments) for place, word in enumerate(words) if word == "-r"):
            if str(Path(name).parent) not in copied:
                yield f"{where}: installs without a copy of {name}"
            yield from (f"{where}: {problem}" for problem in lock_problems(name, root, project))
        for command in at.text.split("&&"):
            if "pip install" in command and "--no-index" not in command and "--require-hashes" not in command:
                yield f"{where}: installs without --require-hashes"


def _expand(text: str, arguments: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda match: arguments.get(match.group(1), ""), text)


def is_pinned(image: str) -> bool:
    """Return whether an image's name has a version."""
    tag = image.rpartition("/")[2].partition(":")[2]
    return "@sha256:" in image or tag not in ("", "latest")


_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"LORAPLEX_[A-Z_]+")
_ASSIGNMENT = re.compile(r"\w+=")
_SHELL_WORDS = frozenset({"set", "for", "do", "done", "if", "then", "fi", "["})
_HELP_TIMEOUT_S = 120
# Compose's keys that our services use; some versions of compose silently ignore a misspelt key.
_SERVICE_KEYS = frozenset(
    {"build", "command", "depends_on", "environment", "expose", "healthcheck", "image", "init"}
    | {"ports", "profiles", "restart", "stop_grace_period", "user", "volumes"}
    | {"cap_drop", "logging", "mem_limit", "networks", "pids_limit", "read_only", "security_opt", "tmpfs"}
)
# Keys of every service that confine it; without a seccomp profile the container engine's default holds.
_CONFINED = {
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "logging": {"driver": "local", "options": {"max-size": "50m", "max-file": "5"}},
    "pids_limit": 2048,
}
_CONDITIONS = frozenset({"service_started", "service_healthy", "service_completed_successfully"})
_INTERPOLATED = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
# HOST:PORT in a flag's value, an operand or a URL.
_ADDRESS = re.compile(r"(?:^|[=/@])([a-z][\w.-]*|\d+\.\d+\.\d+\.\d+):(\d{2,5})(?=$|/)")
_PORT_FLAG = re.compile(r"^--(?:[a-z-]+-)?port$")
_OWN_HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class CommandUsage:
    """Flags of a command, and its LORAPLEX_* variables; one that ends in _ is a prefix of flags' names."""

    flags: frozenset[str]
    variables: frozenset[str]
    has_subcommands: bool

    def knows_variable(self, name: str) -> bool:
        """Return whether the command reads this environment variable."""
        prefixed = (prefix for prefix in self.variables if prefix.endswith("_") and name.startswith(prefix))
        named = ("--" + name.removeprefix(prefix).lower().replace("_", "-") for prefix in prefixed)
        return name in self.variables or any(flag in self.flags for flag in named)


@dataclass(frozen=True)
class Invocation:
    """A command of the project with its arguments: a module that python runs, or a console script."""

    shown: str
    module: str
    arguments: tuple[str, ...]


def split_script(text: str) -> Iterator[list[str]]:
    """Return the commands of a plain shell script with one command a line, without the shell's own."""
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] not in _SHELL_WORDS and not _ASSIGNMENT.match(words[0]):
            yield words


def read_invocation(words: Sequence[str], root: Path) -> Invocation | str:
    """Return the project's command in `words`, or a description of the problem with it."""
    if not words:
        return "an empty command"
    if words[0] in ("python", "python3"):
        if len(words) < 3 or words[1] != "-m":
            return f"{shlex.join(words)}: not `python -m MODULE ...`"
        if not _is_module(words[2]):
            return f"python -m {words[2]}: no such module"
        return Invocation(f"python -m {words[2]}", words[2], tuple(words[3:]))
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    if words[0] not in scripts:
        return f"{words[0]}: not a command of this project"
    return Invocation(words[0], scripts[words[0]].partition(":")[0].removesuffix(".__main__"), tuple(words[1:]))


def _is_module(name: str) -> bool:
    try:
        spec = find_spec(name)
        return spec is not None and (
            spec.submodule_search_locations is None or find_spec(f"{name}.__main__") is not None
        )
    except ModuleNotFoundError:
        return False


def find_usage(invocation: Invocation) -> tuple[str, CommandUsage | None]:
    """Return the command with its subcommands, and the innermost one's usage; None if a subcommand does not exist."""
    shown, subcommands = invocation.shown, list[str]()
    usage = _ask(invocation.module, ())
    for word in invocation.arguments:
        if usage is None or not usage.has_subcommands:
            break
        shown, subcommands = f"{shown} {word}", [*subcommands, word]
        usage = _ask(invocation.module, tuple(subcommands))
    return shown, usage


@cache
def _ask(module: str, subcommands: tuple[str, ...]) -> CommandUsage | None:
    environ = {**os.environ, "COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}
    asked = subprocess.run(
        [sys.executable, "-m", module, *subcommands, "--help"],
        capture_output=True,
        text=True,
        env=environ,
        timeout=_HELP_TIMEOUT_S,
        check=False,
    )
    if asked.returncode != 0:
        return None
    has_subcommands = "COMMAND [ARGS]" in asked.stdout  # Typer's usage line for a group of commands.
    return CommandUsage(
        frozenset(_FLAG.findall(asked.stdout)), frozenset(_VARIABLE.findall(asked.stdout)), has_subcommands
    )


@dataclass(frozen=True)
class ComposeService:
    """A service of the compose file, with ${VARIABLE:-default} replaced by the defaults."""

    name: str
    body: Mapping[str, Any]
    root: Path

    @property
    def commands(self) -> list[list[str]]:
        """Return the words of each command: its command, or those of its script, and its health check."""
        command = [str(word) for word in self.body.get("command", [])]
        health = [str(word) for word in self.body.get("healthcheck", {}).get("test", [])][1:]
        if len(command) == 2 and command[0] == "sh":
            sources = [self.root / source for source, target in self.mounts if target == command[1]]
            commands = [line for path in sources if path.is_file() for line in split_script(path.read_text())]
        else:
            commands = [command]
        return [words for words in (*commands, health) if words]

    @property
    def listens(self) -> set[str]:
        """Return the ports that the service listens on: exposed ones, and values of --port and --...-port flags."""
        ports = {str(port) for port in self.body.get("expose", [])}
        for command in self.commands:
            words = [part for word in command for part in word.split("=", 1)]
            ports |= {value for flag, value in pairwise(words) if _PORT_FLAG.match(flag)}
        return ports

    @property
    def aliases(self) -> list[str]:
        """Return further names of the service in the default network."""
        return list(self.body.get("networks", {}).get("default", {}).get("aliases", []))

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """Return (source, path in the container) of each volume."""
        parts = (str(volume).split(":") for volume in self.body.get("volumes", []))
        return [(part[0], part[1]) for part in parts if len(part) > 1]


def check(root: Path) -> list[str]:
    """Return the problems of `root`/compose.yaml and of the Dockerfiles that it names, one line each."""
    path = root / "compose.yaml"
    try:
        text, undefined = _interpolate(path.read_text())
        document = yaml.safe_load(text)
        services = {name: ComposeService(name, body, root) for name, body in document["services"].items()}
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        return [f"compose.yaml: can't be read as services: {' '.join(str(error).split())}"]
    problems = [f"compose.yaml: variable {name} has no default" for name in undefined]
    for name, service in services.items():
        found = [
            *_shape_problems(service, services, document.get("volumes") or {}),
            *_build_problems(service),
            *_command_problems(service),
            *_address_problems(service, services),
            *_path_problems(service),
        ]
        problems += [f"compose.yaml: service {name}: {problem}" for problem in found]
    return sorted(set(problems), key=problems.index)


def _interpolate(text: str) -> tuple[str, list[str]]:
    undefined = sorted({match.group(1) for match in _INTERPOLATED.finditer(text) if match.group(2) is None})
    return _INTERPOLATED.sub(lambda match: match.group(2) or "", text), undefined


def _shape_problems(
    service: ComposeService, services: Mapping[str, ComposeService], volumes: Mapping[str, Any]
) -> Iterator[str]:
    body = service.body
    yield from (f"unknown key {key}" for key in sorted(set(body) - _SERVICE_KEYS))
    yield from (f"{key} is not {value}" for key, value in _CONFINED.items() if body.get(key) != value)
    if "build" not in body and not is_pinned(str(body.get("image", ""))):
        yield f"image {body.get('image')} has no version"
    if "build" not in body and str(body.get("user", "root")).partition(":")[0] in ("root", "0"):
        yield "runs as root; give it a user"
    for other, need in dict(body.get("depends_on", {})).items():
        if other not in services:
            yield f"depends on {other}, which is no service"
        elif need["condition"] not in _CONDITIONS:
            yield f"unknown condition {need['condition']}"
        elif need["condition"] == "service_healthy" and "healthcheck" not in services[other].body:
            yield f"waits until {other} is healthy, but {other} has no healthcheck"
    for source, _ in service.mounts:
        if not source.startswith((".", "/")) and source not in volumes:
            yield f"volume {source} is not declared"


def _build_problems(service: ComposeService) -> Iterator[str]:
    build = service.body.get("build")
    if build is None:
        return
    context = (service.root / build.get("context", ".")).resolve()
    dockerfile = context / build.get("dockerfile", "Dockerfile")
    if not dockerfile.is_file():
        yield f"no Dockerfile {build.get('dockerfile', 'Dockerfile')}"
        return
    yield from dockerfile_problems(dockerfile, context, build.get("args", {}))


def _command_problems(service: ComposeService) -> Iterator[str]:
    if "build" not in service.body:  # The commands of other projects' images are not checked.
        return
    if not service.commands:
        yield "no command"
    variables = {str(name) for name in service.body.get("environment", {}) if str(name).startswith("LORAPLEX_")}
    for command in service.commands:
        invocation = read_invocation(command, service.root)
        if isinstance(invocation, str):
            yield invocation
            continue
        shown, usage = find_usage(invocation)
        if usage is None:
            yield f"{shown}: no such command (its --help fails)"
            continue
        flags = (word.partition("=")[0] for word in invocation.arguments if word.startswith("--"))
        yield from (f"{shown}: unknown flag {flag}" for flag in flags if flag not in usage.flags)
        variables = {name for name in variables if not usage.knows_variable(name)}
    yield from (f"variable {name} is known to no command of it" for name in sorted(variables))


def _address_problems(service: ComposeService, services: Mapping[str, ComposeService]) -> Iterator[str]:
    """Check that each HOST:PORT names a service that listens there, and each published port is listened on."""
    named = {**services, **{alias: one for one in services.values() for alias in one.aliases}}
    values = [word for command in service.commands for word in command]
    values += [str(value) for value in dict(service.body.get("environment", {})).values()]
    for host, port in (match.groups() for value in values for match in _ADDRESS.finditer(value)):
        target = service if host in _OWN_HOSTS else named.get(host)
        if target is None:
            yield f"{host}:{port}: no service {host}"
        elif port not in target.listens:
            yield f"{host}:{port}: {target.name} does not listen on {port}"
    for published in service.body.get("ports", []):
        port = str(published).rpartition(":")[2]
        if port not in service.listens:
            yield f"publishes port {port}, which it does not listen on"


def _path_problems(service: ComposeService) -> Iterator[str]:
    """Check that mounted files of this host exist, and the command's paths below a mount too."""
    for source, _ in service.mounts:
        if source.startswith(".") and not (service.root / source).exists():
            yield f"mounts {source}, which does not exist"
    values = [word.partition("=")[2] or word for command in service.commands for word in command]
    for path in (value for value in values if value.startswith("/")):
        below = [(source, target) for source, target in service.mounts if Path(path).is_relative_to(target)]
        if not below and not path.startswith("/var/lib/loraplex"):
            yield f"path {path} is neither mounted nor the image's own"
        for source, target in below:
            if source.startswith(".") and not (service.root / source / Path(path).relative_to(target)).exists():
                yield f"path {path}: {source} has no {Path(path).relative_to(target)}"
