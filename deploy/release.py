"""Builds the files of a release in dist/TAG from the tag that is checked out: `make release`.

Everything is built from `git archive TAG`, so nothing else on the machine gets in: the project's source archive and the
SDK's, wheels from these archives, the chart, the description of the images for `docker buildx bake`, an SBOM of each
image, the changelog's section, an unsigned SLSA provenance, and checksums. A tag gives the same bytes each time, by the
same Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOCKS = Path("deploy/docker/locks")
DOCKERFILE = "deploy/docker/loraplex.Dockerfile"
CHECKSUMS = "SHA256SUMS"
# Tools that `make release` installs: the build system by the hashes of LOCKS/build.txt, with pip's report of the files
# that it took; CycloneDX's command; helm.
BUILDER = ROOT / ".cache" / "release"
MATERIALS = BUILDER / "materials.json"
CYCLONEDX = ROOT / ".cache" / "supply-chain" / "bin" / "cyclonedx-py"
HELM = ROOT / ".cache" / "kubernetes" / "helm"
# Names of the images, each with the extras that it installs, which name its lock.
IMAGES = {
    "router": "router,smg",
    "worker": "worker",
    "store": "store,cli",
    "gateway": "gateway",
    "operator": "operator",
}
PLATFORMS = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
BASE = "python:3.12-slim"
# Names of the release's files and images in the pages.
_NAMES = re.compile(r"\bloraplex[^\s:]*?[-:](\d+\.\d+\.\d+)")


class Refusal(Exception):
    """Nothing is built; the message is one sentence."""


@dataclass(frozen=True)
class Source:
    """The release: its version, tag and commit, and the commit's time in seconds since 1970."""

    version: str
    tag: str
    commit: str
    time: int

    @property
    def created(self) -> str:
        """Return the commit's time as RFC 3339 has it."""
        return datetime.fromtimestamp(self.time, UTC).isoformat().replace("+00:00", "Z")


def read_source(root: Path) -> Source:
    """Return what the checkout would release. Raises Refusal."""
    if changes := _git(root, "status", "--porcelain").splitlines():
        raise Refusal(f"the working tree has changes ({changes[0][3:]}): commit or remove them first")
    version, *others = versions(root).items()
    for place, found in others:
        if found != version[1]:
            raise Refusal(f"{place} has the version {found or 'none'}, {version[0]} has {version[1]}: make them equal")
    tag, tags = f"v{version[1]}", _git(root, "tag", "--points-at", "HEAD").split()
    if tag not in tags:
        there = f"tag {', '.join(tags)} is not the version {version[1]}" if tags else "the commit has no tag"
        raise Refusal(f"{there}: check out {tag}, or tag the commit")
    commit, time = _git(root, "log", "-1", "--format=%H %ct").split()
    return Source(version[1], tag, commit, int(time))


def versions(root: Path) -> dict[str, str]:
    """Return the version in each file that has one, that of pyproject.toml first."""
    chart = yaml.safe_load((root / "deploy/chart/Chart.yaml").read_text())
    pages = {page: (root / page).read_text() for page in ("README.md", "docs/guides/kubernetes.md")}
    images = {service["image"] for service in _compose(root)["services"].values() if "build" in service}
    projects = {name: _project(root / name)["version"] for name in ("pyproject.toml", "clients/python/pyproject.toml")}
    return {
        **projects,
        "version of deploy/chart/Chart.yaml": chart["version"],
        "appVersion of deploy/chart/Chart.yaml": chart["appVersion"],
        "VERSION of compose.yaml": _compose(root)["x-build"]["VERSION"],
        **{f"image {image.partition(':')[0]} of compose.yaml": image.partition(":")[2] for image in sorted(images)},
        **{f"{name[0]} of {page}": name[1] for page, text in pages.items() for name in _NAMES.finditer(text)},
        "CHANGELOG.md": next(iter(re.findall(r"^## (\d\S*)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)), ""),
    }


def _project(path: Path) -> Any:
    return tomllib.loads(path.read_text())["project"]


def _compose(root: Path) -> Any:
    return yaml.safe_load((root / "compose.yaml").read_text())


def release(root: Path, place: Path) -> Source:
    """Build the release of the checkout `root` into the empty directory `place`. Raises Refusal."""
    source = read_source(root)
    if not HELM.is_file():
        raise Refusal(f"{HELM.relative_to(ROOT)} is missing: `make test` downloads it from the package index")
    place.mkdir(parents=True)
    # protoc finds its plugin for mypy by PATH.
    environ = {**os.environ, "PATH": f"{BUILDER / 'bin'}:{os.environ['PATH']}"}
    environ |= {"SOURCE_DATE_EPOCH": str(source.time), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        files = subprocess.run(["git", "archive", source.tag], cwd=root, stdout=subprocess.PIPE, check=True).stdout
        with tarfile.open(fileobj=BytesIO(files)) as packed:
            packed.extractall(tree, filter="data")
        for project in (tree / "clients/python", tree):
            python = str(BUILDER / "bin" / "python")
            _run(python, "-m", "hatchling", "build", "-t", "sdist", "-d", str(place), cwd=project, env=environ)
            name = _project(project / "pyproject.toml")["name"].replace("-", "_")
            wheel = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(place))
            sources = str(place / f"{name}-{source.version}.tar.gz")
            _run(python, "-m", "pip", "wheel", "-q", *wheel, sources, cwd=place, env=environ)
        _run(str(HELM), "package", "deploy/chart", "-d", str(place), cwd=tree, env=environ)
        for image, extras in IMAGES.items():
            _write_sbom(tree, place, source, image, extras)
        changes = section((tree / "CHANGELOG.md").read_text(), source.version)
    (place / "CHANGES.md").write_text(changes)
    _write(place / "docker-bake.json", bake(source))
    _write(place / "provenance.json", provenance(source, digests(place), list(_tools())))
    write_checksums(place)
    return source


def write_checksums(place: Path) -> None:
    """Write the file that `sha256sum -c` reads."""
    (place / CHECKSUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests(place).items()))


def _write_sbom(tree: Path, place: Path, source: Source, image: str, extras: str) -> None:
    (sdk,) = place.glob("loraplex_client-*.whl")
    lines = [*shipped((tree / LOCKS / f"{extras}.txt").read_text())]
    lines.append(f"loraplex-client=={source.version} --hash=sha256:{digests(place)[sdk.name]}")
    command = (str(CYCLONEDX), "requirements", "--output-reproducible", "--spec-version", "1.6")
    out = place / f"loraplex-{image}-{source.version}.cdx.json"
    project = ("--pyproject", "pyproject.toml", "-o", str(out), "-")
    _run(*command, *project, cwd=tree, text="\n".join(lines))


def shipped(lock: str) -> Iterator[str]:
    """Return the requirements of a lock that an image has on any of its platforms, each with its hashes in one line."""
    for line in re.sub(r"\\\n *", "", lock).splitlines():
        text, *hashes = line.split(" --hash=")
        marker = Requirement(text).marker
        machines = ({**_IMAGE, "platform_machine": machine} for machine in PLATFORMS.values())
        if marker is None or any(marker.evaluate(machine) for machine in machines):
            yield " --hash=".join((text.partition(" ;")[0].strip(), *(one.strip() for one in hashes)))


# The environment of BASE, as markers of requirements name it.
_IMAGE = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.12.0",
    "python_version": "3.12",
    "sys_platform": "linux",
}


def section(changelog: str, version: str) -> str:
    """Return a version's section of the changelog."""
    found = re.search(rf"^## {re.escape(version)}\b.*?(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return f"{found[0].strip()}\n" if found else ""


def bake(source: Source) -> Mapping[str, Any]:
    """Return the images as `docker buildx bake` builds them in the unpacked source archive, for both architectures.

    The variables REGISTRY and BASE_SHA256 have no default; with a BASE_SHA256 that is no digest, FROM is refused.
    """
    arguments = {
        "BASE": f"{BASE}@sha256:${{BASE_SHA256}}",
        "VERSION": source.version,
        "REVISION": source.commit,
        "CREATED": source.created,
        "SOURCE_DATE_EPOCH": str(source.time),
    }
    targets = {
        image: {
            "context": f"loraplex-{source.version}",
            "dockerfile": DOCKERFILE,
            "args": {**arguments, "EXTRAS": extras},
            "platforms": list(PLATFORMS),
            "tags": [f"${{REGISTRY}}/loraplex-{image}:{source.version}"],
            "attest": ["type=provenance,mode=max", "type=sbom"],
        }
        for image, extras in IMAGES.items()
    }
    return {
        "variable": {"REGISTRY": {"default": ""}, "BASE_SHA256": {"default": ""}},
        "group": {"default": {"targets": list(IMAGES)}},
        "target": targets,
    }


def _tools() -> Iterator[Mapping[str, Any]]:
    """Return what the build was made with, as SLSA's resources: the packages of the build system, and helm."""
    for one in json.loads(MATERIALS.read_text())["install"]:
        yield {
            "uri": f"pkg:pypi/{one['metadata']['name']}@{one['metadata']['version']}",
            "name": one["download_info"]["url"].rpartition("/")[2],
            "digest": one["download_info"]["archive_info"]["hashes"],
        }
    yield {"name": "helm", "digest": {"sha256": _digest(HELM)}}


def provenance(source: Source, subjects: Mapping[str, str], tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the in-toto statement of the build, with SLSA's predicate; nobody has signed it."""
    commit = {"name": f"loraplex {source.tag}", "digest": {"gitCommit": source.commit}}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in subjects.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:loraplex:make-release:1",
                "externalParameters": {"tag": source.tag},
                "internalParameters": {"SOURCE_DATE_EPOCH": source.time},
                "resolvedDependencies": [commit, *tools],
            },
            "runDetails": {
                "builder": {
                    "id": "urn:loraplex:make-release:1",
                    "version": {"python": ".".join(map(str, sys.version_info[:3]))},
                },
            },
        },
    }


def digests(place: Path) -> dict[str, str]:
    """Return the sha256 of each file of the release, by name, but the checksums'."""
    return {path.name: _digest(path) for path in sorted(place.iterdir()) if path.name != CHECKSUMS}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def _run(*command: str, cwd: Path, env: Mapping[str, str] | None = None, text: str | None = None) -> None:
    """Run a tool, and show what it prints if it fails. Raises Refusal."""
    done = subprocess.run(command, cwd=cwd, env=env, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="", file=sys.stderr)
        raise Refusal(f"{Path(command[0]).name} {' '.join(command[1:4])} failed")


def main() -> int:
    """Build into dist/TAG, in place of what is there, and list the files."""
    try:
        source = read_source(ROOT)
        place = ROOT / "dist" / source.tag
        unfinished = place.with_name(f".{source.tag}")
        for one in (place, unfinished):
            shutil.rmtree(one, ignore_errors=True)
        release(ROOT, unfinished)
        unfinished.rename(place)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    print(f"{source.tag} {source.commit}", *sorted(path.name for path in place.iterdir()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
