"""What `make release` is made of: refusals, versions, the packages that ship, images, provenance and checksums.

`make release-check` builds a release, and installs it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.release import (
    DOCKERFILE,
    IMAGES,
    LOCKS,
    ROOT,
    Refusal,
    Source,
    bake,
    digests,
    provenance,
    read_source,
    section,
    shipped,
    versions,
    write_checksums,
)

SOURCE = Source("0.1.0", "v0.1.0", "c" * 40, 1_700_000_000)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Files with a version, and those that tell the commit to a package.
FILES = (
    *("pyproject.toml", "clients/python/pyproject.toml", "deploy/chart/Chart.yaml", "compose.yaml"),
    *("README.md", "docs/guides/kubernetes.md", "CHANGELOG.md", ".gitattributes", "loraplex/commit"),
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of the files that have a version, in one commit without a tag."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *arguments: str) -> str:
    person = {f"GIT_{role}_{what}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environ = {**os.environ, **person, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *arguments], cwd=root, env=environ, capture_output=True, check=True, text=True)
    return done.stdout.strip()


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "Release")


def refusal(root: Path) -> str:
    with pytest.raises(Refusal) as refused:
        read_source(root)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_all_files_have_one_version() -> None:
    assert set(versions(ROOT).values()) == {PROJECT["version"]}
    assert section((ROOT / "CHANGELOG.md").read_text(), PROJECT["version"]).count("\n") > 5


def test_a_tagged_commit_is_released_and_its_archive_names_the_commit(checkout: Path) -> None:
    git(checkout, "tag", "-a", "v0.1.0", "-m", "0.1.0")
    head = git(checkout, "rev-parse", "HEAD")
    assert read_source(checkout) == Source("0.1.0", "v0.1.0", head, int(git(checkout, "log", "-1", "--format=%ct")))
    archive = subprocess.run(["git", "archive", "v0.1.0"], cwd=checkout, capture_output=True, check=True).stdout
    told = subprocess.run(["tar", "-xO", "loraplex/commit"], input=archive, capture_output=True, check=True).stdout
    assert told.decode().strip() == head


def test_what_is_no_release_is_refused_in_a_sentence(checkout: Path) -> None:
    assert refusal(checkout) == "the commit has no tag: check out v0.1.0, or tag the commit"
    git(checkout, "tag", "v0.2.0")
    assert refusal(checkout).startswith("tag v0.2.0 is not the version 0.1.0: ")
    git(checkout, "tag", "v0.1.0")
    (checkout / "README.md").write_text("changed")
    assert refusal(checkout) == "the working tree has changes (README.md): commit or remove them first"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("clients/python/pyproject.toml", '"0.1.0"', '"0.1.1"', "clients/python/pyproject.toml has the version 0.1.1"),
        (
            "deploy/chart/Chart.yaml",
            'appVersion: "0.1.0"',
            'appVersion: "0.1"',
            "appVersion of deploy/chart/Chart.yaml",
        ),
        (
            "compose.yaml",
            "loraplex-worker:0.1.0",
            "loraplex-worker",
            "image loraplex-worker of compose.yaml has the version none",
        ),
        (
            "README.md",
            "./loraplex-0.1.0-py3",
            "./loraplex-0.1.9-py3",
            "loraplex-0.1.9 of README.md has the version 0.1.9",
        ),
        ("CHANGELOG.md", "## 0.1.0", "## Next", "CHANGELOG.md has the version none, pyproject.toml has 0.1.0"),
    ],
)
def test_a_version_that_differs_is_refused(checkout: Path, name: str, old: str, new: str, message: str) -> None:
    text = (checkout / name).read_text()
    assert old in text
    (checkout / name).write_text(text.replace(old, new))
    commit(checkout)
    git(checkout, "tag", "v0.1.0")
    assert message in refusal(checkout)


@pytest.mark.parametrize("extras", IMAGES.values())
def test_an_sbom_lists_what_the_image_installs_and_no_package_of_development(extras: str) -> None:
    lines = list(shipped((ROOT / LOCKS / f"{extras}.txt").read_text()))
    assert all(re.fullmatch(r"[\w.-]+==\S+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)
    names = {line.partition("==")[0] for line in lines}
    dev = {re.split(r"[\[<>=]", one)[0] for one in PROJECT["optional-dependencies"]["dev"]} - {"loraplex", "triton"}
    assert {"grpcio", "redis"} <= names
    assert names & (dev | {"colorama", "httpx2-jsfetch"}) == set()  # of Windows, and of a browser
    assert ("nvidia-cublas" in names) == ("torch" in names) == (extras == "worker")


def test_the_readme_names_the_cuda_of_the_worker_s_image() -> None:
    lock = (ROOT / "deploy/docker/locks/worker.txt").read_text()
    torch, cuda = (re.search(rf"^{name}==(\S+)", lock, re.MULTILINE) for name in ("torch", "cuda-toolkit"))
    assert torch is not None
    assert cuda is not None
    major, minor, *_ = cuda[1].split(".")
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"torch {torch[1]}, as PyPI has it for Linux on x86-64, brings CUDA {major}.{minor}" in readme


def test_the_images_are_built_on_a_digest_for_both_architectures_with_their_version() -> None:
    targets: Any = bake(SOURCE)["target"]
    for image, target in targets.items():
        assert (ROOT / LOCKS / f"{target['args']['EXTRAS']}.txt").is_file()
        assert target["args"]["BASE"] == "python:3.12-slim@sha256:${BASE_SHA256}"
        assert target["args"]["REVISION"] == SOURCE.commit
        assert target["args"]["CREATED"] == "2023-11-14T22:13:20Z"
        assert target["platforms"] == ["linux/amd64", "linux/arm64"]
        assert target["tags"] == [f"${{REGISTRY}}/loraplex-{image}:0.1.0"]
        arguments = set(re.findall(r"^ARG (\w+)", (ROOT / DOCKERFILE).read_text(), re.MULTILINE))
        assert target["args"].keys() - {"SOURCE_DATE_EPOCH"} == arguments
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()
    built = {one["build"]["args"]["EXTRAS"] for one in services if "build" in one}
    assert built | {"operator"} == set(IMAGES.values())


def test_provenance_names_each_file_and_the_commit_and_checksums_verify(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"a")
    (tmp_path / "b.tar.gz").write_bytes(b"b")
    statement: Any = provenance(SOURCE, digests(tmp_path), [{"name": "helm", "digest": {"sha256": "d"}}])
    assert [one["name"] for one in statement["subject"]] == ["a.whl", "b.tar.gz"]
    dependencies = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert [one["digest"] for one in dependencies] == [{"gitCommit": SOURCE.commit}, {"sha256": "d"}]
    write_checksums(tmp_path)
    command = ("sha256sum", "--quiet", "-c", "SHA256SUMS")
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    (tmp_path / "b.tar.gz").write_bytes(b"c")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
