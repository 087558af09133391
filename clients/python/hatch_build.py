"""The build hook of both distributions: generates the gRPC stubs of some proto packages.

Each pyproject.toml configures `protos` (the folder of the .proto files), `packages` (the packages whose stubs this
distribution ships) and `out` (the folder of the stubs). No two distributions ship the same module. In the SDK's source
archive the folder is `protos`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's own generic is private
    """Runs protoc before a wheel or an editable install is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate the stubs; `version` is `standard` or `editable`, both need them."""
        root = Path(self.root)
        out = root / self.config["out"]
        protos = root / self.config["protos"]
        generate(protos if protos.is_dir() else root / "protos", self.config["packages"], out)
        if version == "standard":  # An editable install has `out` on its path.
            build_data["force_include"][str(out / "loraplex")] = "loraplex"


def generate(protos: Path, packages: list[str], out: Path) -> None:
    """Write messages, services and their types for `packages` (such as `inference`) below `out`."""
    from importlib.resources import files

    from grpc_tools import protoc

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    sources = [str(path) for package in packages for path in sorted(protos.glob(f"loraplex/{package}/v1/*.proto"))]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    includes = [f"-I{protos}", f"-I{files('grpc_tools') / '_proto'}"]
    if protoc.main(["protoc", *includes, *outputs, *sources]) != 0:
        raise SystemExit(f"protoc failed on {protos}")
    for package in out.glob("loraplex/*/v1"):
        (package / "py.typed").touch()
