"""The protos have package options of other languages, and generators make code with these alone."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

PROTOS = Path(__file__).resolve().parents[2] / "protos"
NAMES = sorted(path.relative_to(PROTOS) for path in PROTOS.rglob("*.proto"))


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [name for name in programs if shutil.which(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed")


def generate(*outputs: str) -> None:
    subprocess.run(["protoc", "-I", str(PROTOS), *outputs, *map(str, NAMES)], check=True)


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_a_proto_names_its_package_in_each_language(name: Path) -> None:
    importlib.import_module(".".join(name.with_suffix("").parts) + "_pb2")
    file = descriptor_pb2.FileDescriptorProto()
    descriptor_pool.Default().FindFileByName(str(name)).CopyToProto(file)
    _, room, version = name.parent.parts
    assert file.options.go_package == f"loraplex/{room}/{version};{room}{version}"
    assert file.options.java_package == f"loraplex.{room}.{version}"
    # KEDA's own, by which it calls.
    assert file.package == ("externalscaler" if name.stem == "externalscaler" else file.options.java_package)
    assert file.options.java_multiple_files
    assert file.options.csharp_namespace == f"Loraplex.{room.capitalize()}.{version.upper()}"


@needs("protoc")
def test_java_and_csharp_are_generated(tmp_path: Path) -> None:
    generate(f"--java_out={tmp_path}", f"--csharp_out={tmp_path}")
    java = (tmp_path / "loraplex" / "inference" / "v1" / "GenerateRequest.java").read_text()
    assert "package loraplex.inference.v1;" in java
    assert "namespace Loraplex.Inference.V1 {" in (tmp_path / "Inference.cs").read_text()


@needs("protoc", "protoc-gen-go")
def test_go_is_generated(tmp_path: Path) -> None:
    generate(f"--go_out={tmp_path}")
    assert "package inferencev1" in (tmp_path / "loraplex/inference/v1/inference.pb.go").read_text()
    assert {path.parent.relative_to(tmp_path) for path in tmp_path.rglob("*.pb.go")} == {name.parent for name in NAMES}
